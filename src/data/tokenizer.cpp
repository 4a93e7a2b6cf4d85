// The byte tokenizer, loading a tokenizer by name, and what all tokenizers share.
#include "fsdp/tokenizer.h"

#include <filesystem>
#include <numeric>

#include "base/format.h"
#include "base/regular_file.h"
#include "data/json_tokenizer.h"
#include "data/parallel.h"
#include "data/unicode.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kLargestTokenizer = int64_t{1} << 30;  // bytes; real ones have up to 40 MB

class BytesTokenizer : public Tokenizer {
 public:
  static constexpr int32_t kEnd = 256;

  BytesTokenizer() : bytes_(256, '\0') { std::iota(bytes_.begin(), bytes_.end(), '\0'); }

  std::vector<int32_t> encode(std::string_view text, EncodeOptions) const override {
    std::vector<int32_t> ids(text.size());
    for (size_t i = 0; i < text.size(); ++i) ids[i] = static_cast<unsigned char>(text[i]);
    return ids;
  }
  std::vector<std::vector<int32_t>> encode_batch(const std::vector<std::string_view>& texts,
                                                 EncodeOptions options) const override {
    std::vector<std::vector<int32_t>> results(texts.size());
    for_each_index(texts.size(), options.threads,
                   [&](size_t i) { results[i] = encode(texts[i], options); });
    return results;
  }
  std::string_view piece(int32_t id) const override {
    if (id == kEnd) return "<|endoftext|>";
    if (id >= 0 && id < kEnd) return std::string_view(bytes_).substr(id, 1);
    throw Error(formatted("id {} isn't a byte: ids of the bytes tokenizer are 0 to 256.", id),
                "were the tokens made with another tokenizer? Pass it with --tokenizer.");
  }
  bool special(int32_t id) const override { return id == kEnd; }
  int32_t vocab_size() const override { return kEnd + 1; }
  std::optional<int32_t> eos() const override { return kEnd; }
  std::optional<int32_t> bos() const override { return std::nullopt; }
  std::optional<int32_t> id_of(std::string_view token) const override {
    if (token == piece(kEnd)) return kEnd;
    if (token.size() == 1) return static_cast<unsigned char>(token[0]);
    return std::nullopt;
  }
  std::string name() const override { return "bytes"; }
  const std::string& json() const override { return none_; }
  void save(const std::string&) const override {}

 private:
  std::string bytes_, none_;
};

}  // namespace

std::shared_ptr<const Tokenizer> Tokenizer::load(const std::string& what) {
  if (what == "bytes") return std::make_shared<BytesTokenizer>();
  std::error_code ignored;
  fs::path path = what;
  if (fs::is_directory(path, ignored)) path /= "tokenizer.json";
  if (!fs::exists(path, ignored)) {
    throw Error(formatted("there is no tokenizer {}.", what.empty() ? "\"\"" : path.string()),
                "pass a tokenizer.json, a folder that contains one, or bytes.");
  }
  if (path.extension() != ".json") {
    throw Error(formatted("{} isn't a tokenizer.json.", path),
                "convert other kinds of tokenizers with Hugging Face's transformers: "
                "AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained(FOLDER).");
  }
  const bool usual = path.filename() == "tokenizer.json";
  const auto beside = [&](const char* name) {
    const fs::path file = path.parent_path() / name;
    return usual && fs::exists(file, ignored) ? read_file(file, kLargestTokenizer) : std::string();
  };
  return std::make_shared<JsonTokenizer>(path.string(), read_file(path, kLargestTokenizer),
                                         beside("tokenizer_config.json"),
                                         beside("chat_template.jinja"));
}

std::string Tokenizer::decode(const std::vector<int32_t>& ids, bool skip_special) const {
  std::string text;
  for (int32_t id : ids) {
    std::string_view bytes = piece(id);
    if (!skip_special || !special(id)) text += bytes;
  }
  return text;
}

StreamDecoder::StreamDecoder(std::shared_ptr<const Tokenizer> tokenizer, bool skip_special)
    : tokenizer_(std::move(tokenizer)), skip_special_(skip_special) {}

std::string StreamDecoder::push(int32_t id) {
  std::string_view bytes = tokenizer_->piece(id);
  if (!skip_special_ || !tokenizer_->special(id)) {
    // Some tokenizers drop a space at the beginning of a text.
    const std::string alone = first_ ? tokenizer_->decode({id}) : std::string();
    held_ += first_ && bytes.ends_with(alone) ? alone : bytes;
    first_ = false;
  }
  size_t ready = 0;
  while (ready < held_.size()) {
    Utf8Step step = utf8_step(held_, ready);
    if (step.incomplete) break;
    ready += step.length;
  }
  std::string shown = repaired(std::string_view(held_).substr(0, ready));
  held_.erase(0, ready);
  return shown;
}

std::string StreamDecoder::finish() {
  std::string shown = repaired(held_);
  held_.clear();
  return shown;
}

}  // namespace fsdp::data
