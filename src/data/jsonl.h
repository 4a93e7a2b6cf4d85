// JSON lines: one document per line, or the two of a pair, the chosen answer first. conversations.h
// says which kinds there are.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/conversations.h"
#include "fsdp/tokenizer.h"

namespace fsdp::data {

struct JsonlDocument {
  std::vector<int32_t> ids;     // including the end of the document
  std::vector<uint8_t> counts;  // 1 if a token counts in the loss, else 0
  int64_t bytes = 0;            // of the line
  int64_t line = 0;             // its number
};

struct SkippedLines {
  int64_t count = 0;
  std::string first;  // "FILE: line 3: isn't JSON"
};

// The kind of the file's first line (that isn't bad, if those are skipped). Throws Error.
LineKind kind_of_lines(const std::string& path, const JsonlOptions& options);

// Tokenizes a file line by line, in order. Every line must be of the same kind as the first; a bad
// one is an Error with the file and line, or skipped. Empty lines are skipped, too.
SkippedLines tokenise_jsonl(const std::string& path, const Tokenizer& tokenizer,
                            const JsonlOptions& options,
                            const std::function<void(JsonlDocument&&)>& document);

}  // namespace fsdp::data
