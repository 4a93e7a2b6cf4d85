#include "data/chat_format.h"

#include <ctime>
#include <nlohmann/json.hpp>

#include "base/regular_file.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

constexpr int64_t kLargestTemplate = int64_t{1} << 20;  // bytes

std::string spelled(const Tokenizer& tokenizer, std::optional<int32_t> id) {
  return id ? std::string(tokenizer.piece(*id)) : std::string();
}

}  // namespace

ChatFormat::ChatFormat(const Tokenizer& tokenizer, const std::string& file)
    : source_(file.empty() ? tokenizer.chat_template() : read_file(file, kLargestTemplate)),
      begin_(spelled(tokenizer, tokenizer.bos())),
      end_(spelled(tokenizer, tokenizer.eos())) {
  if (source_.empty()) return;
  template_ = std::make_unique<const chat::Template>(
      source_, file.empty() ? "the chat template of " + tokenizer.name() : file);
  special_.push_back(end_);
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id)
    if (tokenizer.special(id)) special_.emplace_back(tokenizer.piece(id));
  const std::time_t now = std::time(nullptr);  // one time for all conversations
  std::tm local{};
  localtime_r(&now, &local);
  options_.now = local;
}

void ChatFormat::add_special(nlohmann::ordered_json& variables) const {
  if (!begin_.empty()) variables["bos_token"] = begin_;
  if (!end_.empty()) variables["eos_token"] = end_;
}

std::string ChatFormat::prompt(nlohmann::ordered_json variables) const {
  add_special(variables);
  chat::RenderOptions options = options_;
  options.generation_prompt = true;
  return template_->render(variables, options).bytes();
}

std::optional<int32_t> ChatFormat::end_of_turn(const Tokenizer& tokenizer) const {
  const nlohmann::ordered_json messages = {{{"role", "user"}, {"content", "a"}},
                                           {{"role", "assistant"}, {"content", "b"}}};
  std::string answer;
  try {
    for (const ChatPiece& piece :
         pieces({{"messages", messages}, {"tools", nullptr}, {"documents", nullptr}}))
      if (piece.counts) answer = piece.text;
  } catch (const Error&) {  // a template for other roles
    return std::nullopt;
  }
  const std::vector<int32_t> ids = tokenizer.encode(answer);
  if (ids.empty() || !tokenizer.special(ids.back())) return std::nullopt;
  return ids.back();
}

std::vector<ChatPiece> ChatFormat::pieces(nlohmann::ordered_json variables) const {
  add_special(variables);
  const chat::Text text = template_->render(variables, options_);
  std::vector<ChatPiece> pieces;
  size_t at = 0;
  const auto add = [&](size_t end, bool counts) {
    if (end > at) pieces.push_back({text.bytes().substr(at, end - at), counts});
    at = std::max(at, end);
  };
  for (const auto& written : template_->written_by_assistant(text, variables, special_, options_)) {
    add(written.from, false);
    add(written.to, true);
  }
  add(text.size(), false);
  return pieces;
}

}  // namespace fsdp::data
