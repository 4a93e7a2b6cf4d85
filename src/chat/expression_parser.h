// Expressions: their precedence is Jinja's, where a filter and a test bind closer than any
// operator.
#pragma once

#include "chat/token_stream.h"

namespace fsdp::chat {

class ExpressionParser : public TokenStream {
 public:
  using TokenStream::TokenStream;

 protected:
  NodePtr expression(bool choice = true);
  // Expressions with commas between them are a tuple; `choice`: "a if b" may be one of them.
  // `brackets`: it may be empty. It ends before the name `end`.
  NodePtr tuple(bool choice = true, bool brackets = false, std::string_view end = {});
  // What can be assigned to. `space`: also NAME.ATTRIBUTE of a namespace.
  NodePtr target(bool space, std::string_view end = {});
  NodePtr filters(NodePtr input);  // `input` | a | b
  NodePtr filter(NodePtr input);   // the part behind "|"
  void arguments(Node& call);

 private:
  NodePtr either();
  NodePtr both();
  NodePtr negation();
  NodePtr comparison();
  NodePtr sum();
  NodePtr concatenation();
  NodePtr product();
  NodePtr power();
  NodePtr signed_value(bool with_filters);
  NodePtr primary(bool space);
  NodePtr constant_or_name(bool space);
  NodePtr string();
  NodePtr list();
  NodePtr dict();
  NodePtr postfix(NodePtr value);
  NodePtr subscript(NodePtr value);
  NodePtr index(NodePtr value, int line);
  NodePtr test(NodePtr value);
  void argument(Node& call);
  bool tuple_ends(std::string_view end) const;
  void check_target(const Node& target);
};

}  // namespace fsdp::chat
