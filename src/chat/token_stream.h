// What the parser's two halves share: the tokens, and how nodes are made.
#pragma once

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "base/format.h"
#include "chat/ast.h"
#include "chat/lexer.h"

namespace fsdp::chat {

constexpr int kDeepestNesting = 100;  // brackets and blocks in each other
constexpr int kDeepestTree = 250;     // nodes in each other

class TokenStream {
 public:
  TokenStream(Machine& machine, std::vector<Token> tokens)
      : machine_(machine), tokens_(std::move(tokens)) {}

 protected:
  const Token& now() const { return tokens_[at_]; }
  const Token& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  const Token& take() {
    const Token& token = tokens_[at_];
    if (at_ + 1 < tokens_.size()) ++at_;
    return token;
  }
  static bool is(const Token& token, Token::Kind kind, std::string_view text) {
    return token.kind == kind && token.text == text;
  }
  bool is_name(std::string_view text) const { return is(now(), Token::kName, text); }
  bool is_operator(std::string_view text) const { return is(now(), Token::kOperator, text); }
  bool skip_name(std::string_view text) { return is_name(text) && (take(), true); }
  bool skip_operator(std::string_view text) { return is_operator(text) && (take(), true); }

  static std::string described(const Token& token) {
    switch (token.kind) {
      case Token::kEnd:
        return "the end of the template";
      case Token::kBlockEnd:
        return "\"%}\"";
      case Token::kVariableEnd:
        return "\"}}\"";
      case Token::kBlockBegin:
        return "\"{%\"";
      case Token::kVariableBegin:
        return "\"{{\"";
      case Token::kData:
        return "text";
      default:
        return formatted("\"{}\"", token.text);
    }
  }
  [[noreturn]] void refuse(const std::string& why) {
    machine_.line = now().line;
    machine_.refuse(why);
  }
  [[noreturn]] void refuse_token(const std::string& expected) {
    refuse(formatted("{} stands where {} is expected", described(now()), expected));
  }
  void expect_operator(std::string_view text) {
    if (!skip_operator(text)) refuse_token(formatted("\"{}\"", text));
  }
  void expect_name(std::string_view text) {
    if (!skip_name(text)) refuse_token(formatted("\"{}\"", text));
  }
  void expect(Token::Kind kind, const char* what) {
    if (now().kind != kind) refuse_token(what);
    take();
  }
  std::string name() {
    if (now().kind != Token::kName) refuse_token("a name");
    return take().text;
  }

  NodePtr node(NodeKind kind, int line, Nodes parts = {}) {
    auto made = std::make_unique<Node>();
    made->kind = kind;
    made->line = line;
    made->parts = std::move(parts);
    return finished(std::move(made));
  }
  template <class... Parts>
  NodePtr made_of(NodeKind kind, int line, Parts... parts) {
    Nodes all;
    (all.push_back(std::move(parts)), ...);
    return node(kind, line, std::move(all));
  }
  // Call it again when parts were added.
  NodePtr finished(NodePtr made) {
    const auto below = [&](const NodePtr& part) {
      if (part) made->depth = std::max(made->depth, part->depth + 1);
    };
    for (const Nodes* list : {&made->parts, &made->body, &made->otherwise, &made->arguments})
      std::for_each(list->begin(), list->end(), below);
    for (const auto& [name, part] : made->named) below(part);
    below(made->spread);
    below(made->spread_named);
    if (made->depth > kDeepestTree) refuse("the template nests too deeply");
    return made;
  }

  // While one construct is parsed inside another.
  class Nested {
   public:
    explicit Nested(TokenStream& stream) : stream_(stream) {
      if (++stream_.nesting_ > kDeepestNesting) stream_.refuse("the template nests too deeply");
    }
    ~Nested() { --stream_.nesting_; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;

   private:
    TokenStream& stream_;
  };

  Machine& machine_;
  std::set<std::string>* names_used_ = nullptr;  // by the macro that is parsed, or null

 private:
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int nesting_ = 0;
};

}  // namespace fsdp::chat
