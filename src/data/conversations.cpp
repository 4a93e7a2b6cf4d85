#include "data/conversations.h"

#include <array>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "base/shallow_json.h"

namespace fsdp::data {
namespace {

struct Speaker {
  const char *from, *role;
};
constexpr Speaker kSpeakers[] = {
    {"human", "user"},          {"user", "user"},         {"gpt", "assistant"},
    {"assistant", "assistant"}, {"chatgpt", "assistant"}, {"model", "assistant"},
    {"bing", "assistant"},      {"bard", "assistant"},    {"function_call", "assistant"},
    {"system", "system"},       {"tool", "tool"},         {"function_response", "tool"},
    {"observation", "tool"},
};

bool is_list(const OrderedJson& line, const char* key) {
  const auto found = line.find(key);
  return found != line.end() && found->is_array();
}

// transformers gives the reasoning of a message under two names.
OrderedJson with_reasoning(const OrderedJson& message) {
  for (const char* key : {"reasoning_content", "thinking", "reasoning"}) {
    const auto found = message.find(key);
    if (found == message.end() || found->is_null()) continue;
    const OrderedJson reasoning = *found;
    OrderedJson aliased = {{"thinking", reasoning}};
    aliased.update(message);
    aliased["reasoning_content"] = reasoning;
    return aliased;
  }
  return message;
}

OrderedJson checked(const OrderedJson& message, size_t number) {
  if (!message.is_object()) throw BadLine{formatted("message {} isn't an object", number)};
  const auto role = message.find("role");
  if (role == message.end() || !role->is_string())
    throw BadLine{formatted("message {} has no \"role\"", number)};
  const auto content = message.find("content");
  const bool calls = message.contains("tool_calls");
  if (content == message.end()
          ? !calls
          : !content->is_string() && !content->is_array() && !content->is_null())
    throw BadLine{formatted("message {} has no \"content\" that is text", number)};
  return with_reasoning(message);
}

OrderedJson from_share_gpt(const OrderedJson& turn, size_t number) {
  if (turn.is_object() && turn.contains("role")) return checked(turn, number);
  const OrderedJson name = turn.is_object() && turn.contains("from") ? turn["from"] : OrderedJson();
  const std::string from = name.is_string() ? name.get<std::string>() : "";
  for (const Speaker& speaker : kSpeakers) {
    if (from != speaker.from) continue;
    const auto value = turn.find("value");
    if (value == turn.end() || !value->is_string())
      throw BadLine{formatted("turn {} has no \"value\" that is text", number)};
    return {{"role", speaker.role}, {"content", *value}};
  }
  throw BadLine{from.empty()
                    ? formatted("turn {} has no \"from\"", number)
                    : formatted("turn {} is from \"{}\", which is nobody known", number, from)};
}

// "system" of a line that has no such message.
void add_system(const OrderedJson& line, OrderedJson& messages) {
  const auto system = line.find("system");
  if (system == line.end() || !system->is_string() || *system == "") return;
  messages.push_back({{"role", "system"}, {"content", *system}});
}

// "tools" and such may be JSON, or text that is JSON.
OrderedJson parsed(const OrderedJson& value, const char* key) {
  if (!value.is_string()) return value;
  OrderedJson inner = parse_shallow<OrderedJson>(value.get_ref<const std::string&>(), kMostLevels);
  if (inner.is_discarded()) throw BadLine{formatted("\"{}\" is text that isn't JSON", key)};
  return inner;
}

std::string alpaca_question(const OrderedJson& line) {
  std::string question = text_of(line, "instruction");
  const auto input = line.find("input");
  if (input == line.end() || input->is_null() || *input == "") return question;
  return question + "\n\n" + text_of(line, "input");
}

OrderedJson no_messages() {
  return {{"messages", OrderedJson::array()}, {"tools", nullptr}, {"documents", nullptr}};
}

// What a line passes to the template beside its messages.
void add_variables(const OrderedJson& line, OrderedJson& variables) {
  for (const char* key : {"tools", "documents"})
    if (line.contains(key)) variables[key] = parsed(line[key], key);
  const auto more = line.find("chat_template_kwargs");
  if (more == line.end() || !more->is_object()) return;
  for (const auto& [key, value] : more->items())
    if (key != "messages") variables[key] = value;
}

}  // namespace

const char* described(LineKind kind) {
  static constexpr std::array kNames = {"text",
                                        "prompts and completions",
                                        "conversations (messages)",
                                        "conversations (ShareGPT)",
                                        "instructions (Alpaca)",
                                        "pairs of chosen and rejected answers"};
  return kNames[static_cast<size_t>(kind)];
}

const std::string& text_of(const OrderedJson& line, const std::string& field) {
  const auto found = line.find(field);
  if (found == line.end() || !found->is_string())
    throw BadLine{formatted("\"{}\" isn't a string", field)};
  return found->get_ref<const std::string&>();
}

LineKind kind_of(const OrderedJson& line, const JsonlOptions& options) {
  if (!line.is_object()) throw BadLine{"isn't an object"};
  const bool text = line.contains(options.text_field);
  const bool prompts =
      line.contains(options.prompt_field) && line.contains(options.completion_field);
  const JsonlOptions usual;
  if (text && options.text_field != usual.text_field) return LineKind::kText;
  if (prompts && options.prompt_field != usual.prompt_field) return LineKind::kPrompts;
  if (line.contains("chosen") && line.contains("rejected")) return LineKind::kPairs;
  if (is_list(line, "messages")) return LineKind::kMessages;
  if (is_list(line, "conversations")) return LineKind::kShareGpt;
  if (prompts) return LineKind::kPrompts;
  if (line.contains("instruction") && line.contains("output")) return LineKind::kAlpaca;
  if (text) return LineKind::kText;
  throw BadLine{
      formatted("has no \"{}\", no messages and no other known fields", options.text_field)};
}

OrderedJson conversation_of(const OrderedJson& line, LineKind kind) {
  OrderedJson variables = no_messages();
  OrderedJson& messages = variables["messages"];
  if (kind == LineKind::kAlpaca) {
    add_system(line, messages);
    messages.push_back({{"role", "user"}, {"content", alpaca_question(line)}});
    messages.push_back({{"role", "assistant"}, {"content", text_of(line, "output")}});
  } else {
    const bool share_gpt = kind == LineKind::kShareGpt;
    const OrderedJson& turns = line[share_gpt ? "conversations" : "messages"];
    if (share_gpt) add_system(line, messages);
    size_t number = 0;
    for (const OrderedJson& turn : turns) {
      ++number;
      messages.push_back(share_gpt ? from_share_gpt(turn, number) : checked(turn, number));
    }
    if (turns.empty()) throw BadLine{"has no messages"};
  }
  add_variables(line, variables);
  return variables;
}

OrderedJson conversation_of_pair(const OrderedJson& line, const char* side) {
  OrderedJson variables = no_messages();
  OrderedJson& messages = variables["messages"];
  size_t number = 0;
  for (const char* part : {"prompt", side}) {
    if (!is_list(line, part)) continue;
    for (const OrderedJson& turn : line[part]) messages.push_back(checked(turn, ++number));
  }
  add_variables(line, variables);
  return variables;
}

std::string alpaca_prompt(const OrderedJson& line) {
  return formatted("Instruction:\n{}\n\nResponse:\n", alpaca_question(line));
}

}  // namespace fsdp::data
