// Many prompts from a file, answered in batches: `fsdp generate --prompts FILE`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cli/chat.h"
#include "cli/writer.h"

namespace fsdp::cli {

struct PromptsOptions {
  std::string file;    // .jsonl: lines of JSON; else each line is a prompt
  std::string system;  // the first message of each conversation; empty: none
  int64_t batch = 8;   // prompts that are continued together
  bool quiet = false;
};

// Whether the file has conversations, which need a chat template. Throws Error.
bool has_conversations(const std::string& file);

// Writes a line of JSON for each prompt to stdout, in order: {"prompt", "completion"}, or
// {"messages"} with the answer as the last one; and "tokens" and "end" ("stop" or "length").
// `chat`: how to ask; null: continue texts.
int answer_prompts(Writer& writer, const Chat* chat, const PromptsOptions& options,
                   const train::SampleOptions& sample);

}  // namespace fsdp::cli
