// Documents as JSON lines: a text, or a prompt and a completion. Each document has as many marks as
// ids.
#include "data/jsonl.h"

#include <cstdlib>
#include <cstring>

#include "data/mapped_file.h"
#include "fsdp/error.h"

namespace data = fsdp::data;

namespace {

std::string_view fuzzed_lines;

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
  static const auto tokenizer = data::Tokenizer::load("bytes");
  data::JsonlOptions options;
  options.threads = 1;
  try {
    const bool prompts = data::has_prompts("fuzzed.jsonl", options);
    data::tokenise_jsonl("fuzzed.jsonl", *tokenizer, options, [&](data::JsonlDocument&& document) {
      if (document.ids.size() != document.counts.size() || document.bytes < 1) std::abort();
      for (const uint8_t counts : document.counts)
        if (counts > 1 || (!prompts && counts == 0)) std::abort();
    });
  } catch (const fsdp::Error&) {
  }
  return 0;
}
