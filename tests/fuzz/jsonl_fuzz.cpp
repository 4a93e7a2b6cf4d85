// Documents as JSON lines of every kind; bad lines stop, or are skipped. Each document has as many
// marks as ids.
#include "data/jsonl.h"

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/error.h"
#include "fuzz/token_files.h"

namespace data = fsdp::data;

namespace {

// The bytes tokenizer with a chat template.
class WithTemplate : public data::Tokenizer {
 public:
  explicit WithTemplate(std::shared_ptr<const data::Tokenizer> bytes) : bytes_(std::move(bytes)) {}
  std::vector<int32_t> encode(std::string_view text, data::EncodeOptions options) const override {
    return bytes_->encode(text, options);
  }
  std::vector<std::vector<int32_t>> encode_batch(const std::vector<std::string_view>& texts,
                                                 data::EncodeOptions options) const override {
    return bytes_->encode_batch(texts, options);
  }
  std::string_view piece(int32_t id) const override { return bytes_->piece(id); }
  bool special(int32_t id) const override { return bytes_->special(id); }
  int32_t vocab_size() const override { return bytes_->vocab_size(); }
  std::optional<int32_t> eos() const override { return bytes_->eos(); }
  std::optional<int32_t> bos() const override { return bytes_->bos(); }
  std::optional<int32_t> id_of(std::string_view token) const override {
    return bytes_->id_of(token);
  }
  std::string name() const override { return "fuzzed"; }
  const std::string& json() const override { return bytes_->json(); }
  std::string chat_template() const override {
    return "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}"
           "{{ m.tool_calls | tojson }}{% endif %}{{ eos_token }}\n{% endfor %}"
           "{% if add_generation_prompt %}<assistant>{% endif %}";
  }
  void save(const std::string&) const override {}

 private:
  std::shared_ptr<const data::Tokenizer> bytes_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  fsdp::fuzz::files_in_memory()["fuzzed.jsonl"] = {reinterpret_cast<const char*>(bytes), size};
  static const auto tokenizer = std::make_shared<WithTemplate>(data::Tokenizer::load("bytes"));
  data::JsonlOptions options;
  options.threads = 1;
  options.batch = 16;  // lines lie across reads
  for (const auto bad_lines : {data::BadLines::kStop, data::BadLines::kSkip}) {
    options.bad_lines = bad_lines;
    try {
      const bool masked = data::has_mask(data::kind_of_lines("fuzzed.jsonl", options));
      data::tokenise_jsonl(
          "fuzzed.jsonl", *tokenizer, options, [&](data::JsonlDocument&& document) {
            if (document.ids.size() != document.counts.size() || document.bytes < 1) std::abort();
            for (const uint8_t counts : document.counts)
              if (counts > 1 || (!masked && counts == 0)) std::abort();
          });
    } catch (const fsdp::Error&) {
    }
  }
  return 0;
}
