// JSON lines: one document per line, `{"text": "..."}`, or a prompt and a completion.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fsdp/tokenizer.h"

namespace fsdp::data {

struct JsonlOptions {
  std::string text_field = "text";
  // If a line has both of these instead, only the completion and the end of the document count in
  // the loss.
  std::string prompt_field = "prompt";
  std::string completion_field = "completion";
  int threads = 0;
  int64_t batch = int64_t{32} << 20;  // bytes of the file that are read and processed at a time
};

struct JsonlDocument {
  std::vector<int32_t> ids;     // including the end of the document
  std::vector<uint8_t> counts;  // 1 if a token counts in the loss, else 0
  int64_t bytes = 0;            // of the line
};

// True if the file's first line has a prompt and a completion, false if it has a text. Throws Error
// if it has neither.
bool has_prompts(const std::string& path, const JsonlOptions& options);

// Tokenizes a file line by line, in order. Every line must be of the same kind as the first; else
// throws Error with the file and line. Empty lines are skipped.
void tokenise_jsonl(const std::string& path, const Tokenizer& tokenizer,
                    const JsonlOptions& options,
                    const std::function<void(JsonlDocument&&)>& document);

}  // namespace fsdp::data
