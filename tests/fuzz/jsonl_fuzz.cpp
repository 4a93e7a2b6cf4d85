// Documents as JSON lines of every kind; bad lines stop, or are skipped. Each document has as many
// marks as ids.
#include "data/jsonl.h"

#include <cstdlib>
#include <cstring>

#include "data/mapped_file.h"
#include "fsdp/error.h"

namespace data = fsdp::data;

namespace {

std::string_view fuzzed_lines;

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

// MappedFile of src/data on the heap, where the address sanitizer sees a read past the end. A real
// mapping continues to the end of its page.
namespace fsdp::data {

MappedFile::MappedFile(const std::string& path) : path_(path) {
  size_ = fuzzed_lines.size();
  if (size_ == 0) return;
  data_ = new char[size_];
  std::memcpy(data_, fuzzed_lines.data(), size_);
}

MappedFile::~MappedFile() {
  delete[] static_cast<char*>(data_);
}

}  // namespace fsdp::data

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  fuzzed_lines = {reinterpret_cast<const char*>(bytes), size};
  static const auto tokenizer = std::make_shared<WithTemplate>(data::Tokenizer::load("bytes"));
  data::JsonlOptions options;
  options.threads = 1;
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
