// Documents as JSON lines: a text, or a prompt and a completion. Each document has as many marks as
// ids.
#include "data/jsonl.h"

#include <cstdlib>

#include "fsdp/error.h"
#include "fuzz/token_files.h"

namespace data = fsdp::data;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  fsdp::fuzz::files_in_memory()["fuzzed.jsonl"] = {reinterpret_cast<const char*>(bytes), size};
  static const auto tokenizer = data::Tokenizer::load("bytes");
  data::JsonlOptions options;
  options.threads = 1;
  options.batch = 16;  // lines lie across reads
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
