// JSON lines: a document a line, `{"text": "..."}`, or a prompt and its completion.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fsdp/tokenizer.h"

namespace fsdp::data {

struct JsonlOptions {
  std::string text_field = "text";
  // Where a line has both of these instead, only the completion (and the end of the document)
  // counts in the loss.
  std::string prompt_field = "prompt";
  std::string completion_field = "completion";
  int threads = 0;
};

struct JsonlDocument {
  std::vector<int32_t> ids;     // the end of document included
  std::vector<uint8_t> counts;  // 1 where a token counts in the loss
  int64_t bytes = 0;            // of the line
};

// True if the file's first line is a prompt and a completion. Throws Error if it is neither.
bool has_prompts(const std::string& path, const JsonlOptions& options);

// Tokenises a file, line by line and in order. Every line must be of the same kind as the first;
// what is wrong is an Error that names file and line. Empty lines do not count.
void tokenise_jsonl(const std::string& path, const Tokenizer& tokenizer,
                    const JsonlOptions& options,
                    const std::function<void(JsonlDocument&&)>& document);

}  // namespace fsdp::data
