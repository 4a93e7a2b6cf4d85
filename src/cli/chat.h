// A conversation with a model: `fsdp generate --chat`.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cli/writer.h"
#include "data/chat_format.h"

namespace fsdp::cli {

// How a conversation becomes a prompt for this model. Throws Error if it has no chat template.
class Chat {
 public:
  // `file`: a template; empty: the one that the run was trained with, else the tokenizer's. Adds
  // the token that ends a turn to the writer's ends.
  Chat(Writer& writer, const std::string& file);

  // The prompt for the next answer. `conversation`: {"messages": …} and what else its template
  // reads.
  std::vector<int64_t> prompt(const nlohmann::ordered_json& conversation) const;
  // One that says this.
  static nlohmann::ordered_json begin(const std::string& system);
  static void say(nlohmann::ordered_json& conversation, const char* role, const std::string& text);

 private:
  const Writer& writer_;
  data::ChatFormat format_;
};

struct ChatOptions {
  std::string system;  // the first message; empty: none
  std::string prompt;  // the only question; empty: each line of stdin is one
  bool quiet = false;
};

// Answers until stdin ends. Answers go to stdout as they are written; on a terminal, what is typed
// is there as well.
int converse(Writer& writer, const Chat& chat, const ChatOptions& options,
             const train::SampleOptions& sample);

}  // namespace fsdp::cli
