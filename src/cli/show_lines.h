// Shows documents of JSON lines, and what of them is trained on.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

#include "data/jsonl.h"

namespace fsdp::cli {

// Shows the first documents of a file, at most `most`; returns how many. What counts in the loss is
// green where stdout has colours, and between [[ and ]] otherwise.
int64_t show_lines(const std::string& path, const data::Tokenizer& tokenizer,
                   const data::JsonlOptions& options, int64_t most, std::ostream& out);

// Says on stderr that lines were skipped, if any were.
void say_skipped(const std::string& path, const data::SkippedLines& skipped);

}  // namespace fsdp::cli
