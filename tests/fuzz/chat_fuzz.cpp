// Chat templates, with a conversation behind a line "---" or a fixed one. Rendering ends within its
// limits, and what an assistant wrote lies in the text, in order.
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "chat/template.h"
#include "fsdp/error.h"

namespace chat = fsdp::chat;

namespace {

using Json = nlohmann::ordered_json;

const char* const kConversation = R"({"bos_token": "<s>", "eos_token": "</s>", "tools": [
  {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], "messages": [
  {"role": "system", "content": "be brief"}, {"role": "user", "content": "a é 日本"},
  {"role": "assistant", "content": "<think>\nx</think> b", "tool_calls": [
    {"function": {"name": "f", "arguments": {"x": [1, 2.5, null, true]}}}]},
  {"role": "tool", "content": "r"}, {"role": "assistant", "content": "done"}]})";

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(bytes), size);
  const size_t line = input.find("\n---\n");
  Json variables = Json::parse(
      line == std::string_view::npos ? kConversation : input.substr(line + 5), nullptr, false);
  if (!variables.is_object() || !variables.contains("messages")) return 0;
  chat::RenderOptions options;
  options.now = std::tm{};
  options.limits = {.steps = 100'000, .bytes = 8 << 20, .output = 1 << 20};
  try {
    const chat::Template fuzzed(input.substr(0, line), "fuzzed.jinja");
    const chat::Text text = fuzzed.render(variables, options);
    if (!text.runs().empty() && text.runs().back().end != text.size()) std::abort();
    size_t at = 0;
    for (const auto& one :
         fuzzed.written_by_assistant(text, variables, {"</s>", "<|im_end|>"}, options)) {
      if (one.from < at || one.to <= one.from || one.to > text.size()) std::abort();
      at = one.to;
    }
  } catch (const fsdp::Error&) {
  }
  return 0;
}
