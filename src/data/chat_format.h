// ChatFormat: a tokenizer's chat template, which turns a conversation into text and says which of
// it counts in the loss.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "chat/template.h"
#include "fsdp/tokenizer.h"

namespace fsdp::data {

// Text that counts in the loss, or doesn't. Pieces are tokenized one by one: at inference, too, a
// prompt ends where an answer begins.
struct ChatPiece {
  std::string text;
  bool counts = false;
};

class ChatFormat {
 public:
  // `file`: a template; empty: the tokenizer's. Throws Error.
  ChatFormat(const Tokenizer& tokenizer, const std::string& file);

  bool exists() const { return template_ != nullptr; }
  const std::string& source() const { return source_; }  // the template's text, empty without one

  // Throws Error, which names the template and its line.
  std::vector<ChatPiece> pieces(nlohmann::ordered_json variables) const;
  // The conversation so far and what an answer begins with, for a model that writes on.
  std::string prompt(nlohmann::ordered_json variables) const;
  // The token that ends an answer, as the template writes one; nullopt if it writes no special one.
  std::optional<int32_t> end_of_turn(const Tokenizer& tokenizer) const;

 private:
  void add_special(nlohmann::ordered_json& variables) const;

  std::string source_;
  std::unique_ptr<const chat::Template> template_;
  std::vector<std::string> special_;  // the token that ends a text is the first
  std::string begin_, end_;           // bos_token and eos_token
  chat::RenderOptions options_;
};

}  // namespace fsdp::data
