// Lines of JSON as documents: which kind a line is, and the conversation or texts in it.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "base/enum_names.h"

namespace fsdp::data {

using OrderedJson = nlohmann::ordered_json;
constexpr int kMostLevels = 100;  // of lists and objects in a line

enum class BadLines { kStop, kSkip };
constexpr auto enum_table(BadLines) {
  return std::to_array<EnumName>({{"stop"}, {"skip"}});
}

enum class LineKind {
  kText,      // {"text": ..}
  kPrompts,   // {"prompt": .., "completion": ..}
  kMessages,  // {"messages": [{"role": .., "content": ..}, ..]}
  kShareGpt,  // {"conversations": [{"from": .., "value": ..}, ..]}
  kAlpaca,    // {"instruction": .., "input": .., "output": ..}
  kPairs,     // {"prompt": .., "chosen": .., "rejected": ..}
};
const char* described(LineKind kind);  // "conversations (messages)"

// Whether only a part of each line counts in the loss.
inline bool has_mask(LineKind kind) {
  return kind != LineKind::kText;
}

struct JsonlOptions {
  std::string text_field = "text";
  // If a line has both of these instead, only the completion and the end of the document count in
  // the loss.
  std::string prompt_field = "prompt";
  std::string completion_field = "completion";
  std::string chat_template;  // a file; empty: the tokenizer's
  BadLines bad_lines = BadLines::kStop;
  int threads = 0;
  int64_t batch = int64_t{32} << 20;  // bytes of the file that are read and processed at a time
};

// What is wrong with a line, without its full stop.
struct BadLine {
  std::string why;
};

// These throw BadLine.
LineKind kind_of(const OrderedJson& line, const JsonlOptions& options);
const std::string& text_of(const OrderedJson& line, const std::string& field);
// The variables of a chat template: messages, and tools and such if the line has them.
OrderedJson conversation_of(const OrderedJson& line, LineKind kind);
// The same of a pair's "chosen" or "rejected", if that is a list of messages; they follow those of
// "prompt", if that is a list, too.
OrderedJson conversation_of_pair(const OrderedJson& line, const char* side);
// The question of an Alpaca line, for tokenizers without a chat template.
std::string alpaca_prompt(const OrderedJson& line);

}  // namespace fsdp::data
