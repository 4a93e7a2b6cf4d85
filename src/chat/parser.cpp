// Statements.
#include "chat/parser.h"

#include "chat/expression_parser.h"

namespace fsdp::chat {
namespace {

using Ends = std::initializer_list<std::string_view>;

class Parser : public ExpressionParser {
 public:
  using ExpressionParser::ExpressionParser;

  Parsed run() {
    Parsed parsed;
    parsed.body = statements({});
    parsed.has_generation = generation_;
    return parsed;
  }

 private:
  bool at_end_tag(Ends ends) const {
    return now().kind == Token::kBlockBegin && ahead().kind == Token::kName &&
           std::find(ends.begin(), ends.end(), ahead().text) != ends.end();
  }

  // Until a tag of `ends`, which stays; without `ends` until the end of the template.
  Nodes statements(Ends ends) {
    const Nested nested(*this);
    Nodes all;
    while (!at_end_tag(ends)) {
      const int line = now().line;
      if (now().kind == Token::kEnd) {
        if (ends.size() == 0) return all;
        refuse(formatted("a tag {{% {} %}} is missing", *ends.begin()));
      }
      if (now().kind == Token::kData) {
        all.push_back(node(NodeKind::kData, line));
        all.back()->value = std::make_shared<const Text>(take().text);
      } else if (now().kind == Token::kVariableBegin) {
        take();
        all.push_back(made_of(NodeKind::kPrint, line, tuple()));
        expect(Token::kVariableEnd, "\"}}\"");
      } else {
        expect(Token::kBlockBegin, "a tag");
        all.push_back(finished(statement()));
        expect(Token::kBlockEnd, "\"%}\"");
      }
    }
    return all;
  }

  // The content of a block, from the end of its first tag to the word of its last, which is taken.
  Nodes body(Ends ends, std::string* last = nullptr) {
    skip_operator(":");
    expect(Token::kBlockEnd, "\"%}\"");
    Nodes all = statements(ends);
    take();
    const std::string word = take().text;
    if (last) *last = word;
    return all;
  }

  NodePtr statement() {
    const int line = now().line;
    const std::string word = name();
    if (word == "if") return if_statement(line);
    if (word == "for") return for_loop(line);
    if (word == "set") return set(line);
    if (word == "macro") return macro(line);
    if (word == "call") return call_block(line);
    if (word == "filter") return filter_block(line);
    if (word == "with") return with(line);
    if (word == "print") return made_of(NodeKind::kPrint, line, expression());
    if (word == "generation") return generation(line);
    if (word == "break" || word == "continue") {
      if (loops_ == 0) refuse(formatted("\"{}\" stands outside of a loop", word));
      return node(word == "break" ? NodeKind::kBreak : NodeKind::kContinue, line);
    }
    machine_.line = line;
    machine_.refuse(formatted("the tag \"{}\" isn't supported here", word));
  }

  NodePtr if_statement(int line) {
    NodePtr result = node(NodeKind::kIf, line);
    std::string word = "elif";
    while (word == "elif") {
      result->parts.push_back(tuple(false));
      NodePtr branch = node(NodeKind::kBranch, now().line);
      branch->body = body({"endif", "elif", "else"}, &word);
      result->body.push_back(finished(std::move(branch)));
    }
    if (word == "else") result->otherwise = body({"endif"});
    return result;
  }

  NodePtr for_loop(int line) {
    NodePtr variable = target(false, "in");
    expect_name("in");
    NodePtr items = tuple(false, false, "recursive");
    NodePtr condition = skip_name("if") ? expression() : nullptr;
    if (is_name("recursive")) refuse("recursive loops aren't supported");
    NodePtr result =
        made_of(NodeKind::kFor, line, std::move(variable), std::move(items), std::move(condition));
    std::string word;
    ++loops_;
    result->body = body({"endfor", "else"}, &word);
    --loops_;
    if (word == "else") result->otherwise = body({"endfor"});
    return result;
  }

  NodePtr set(int line) {
    NodePtr variable = target(true);
    if (skip_operator("=")) return made_of(NodeKind::kSet, line, std::move(variable), tuple());
    NodePtr chain = is_operator("|") ? filters(node(NodeKind::kHole, line)) : nullptr;
    NodePtr result = made_of(NodeKind::kSetBlock, line, std::move(variable), std::move(chain));
    result->body = in_function([&] { return body({"endset"}); });
    return result;
  }

  void signature(Node& macro) {
    expect_operator("(");
    bool optional = false;
    while (!is_operator(")")) {
      macro.names.push_back(name());
      const bool has_default = skip_operator("=");
      macro.parts.push_back(has_default ? expression() : nullptr);
      if (optional && !has_default) refuse("an argument without a default follows one with it");
      optional = has_default;
      if (!skip_operator(",")) break;
    }
    expect_operator(")");
  }

  // What a function contains can't leave a loop around it.
  template <class Work>
  Nodes in_function(Work work) {
    const int outer = std::exchange(loops_, 0);
    Nodes all = work();
    loops_ = outer;
    return all;
  }

  void macro_body(Node& macro, Ends ends) {
    std::set<std::string> used;
    auto* outer = std::exchange(names_used_, &used);
    macro.body = in_function([&] { return body(ends); });
    names_used_ = outer;
    if (outer) outer->insert(used.begin(), used.end());
    const auto uses = [&](const char* special) {
      return used.contains(special) &&
             std::find(macro.names.begin(), macro.names.end(), special) == macro.names.end();
    };
    macro.uses_varargs = uses("varargs");
    macro.uses_kwargs = uses("kwargs");
    macro.uses_caller = uses("caller");
  }

  NodePtr macro(int line) {
    NodePtr result = node(NodeKind::kMacro, line);
    result->text = name();
    signature(*result);
    macro_body(*result, {"endmacro"});
    return result;
  }

  NodePtr call_block(int line) {
    NodePtr inner = node(NodeKind::kMacro, line);
    inner->text = "caller";
    if (is_operator("(")) signature(*inner);
    NodePtr call = expression();
    if (call->kind != NodeKind::kCall) refuse("\"call\" needs a call of a macro");
    macro_body(*inner, {"endcall"});
    return made_of(NodeKind::kCallBlock, line, std::move(call), finished(std::move(inner)));
  }

  NodePtr filter_block(int line) {
    NodePtr chain = filters(filter(node(NodeKind::kHole, line)));
    NodePtr result = made_of(NodeKind::kFilterBlock, line, std::move(chain));
    result->body = in_function([&] { return body({"endfilter"}); });
    return result;
  }

  NodePtr with(int line) {
    NodePtr result = node(NodeKind::kWith, line);
    while (now().kind != Token::kBlockEnd) {
      if (!result->parts.empty()) expect_operator(",");
      result->parts.push_back(target(false));
      expect_operator("=");
      result->parts.push_back(expression());
    }
    result->body = body({"endwith"});
    return result;
  }

  NodePtr generation(int line) {
    generation_ = true;
    NodePtr result = node(NodeKind::kGeneration, line);
    result->body = in_function([&] { return body({"endgeneration"}); });
    return result;
  }

  int loops_ = 0;  // around the statement, in the same function
  bool generation_ = false;
};

}  // namespace

Parsed parse(Machine& machine, std::string_view source) {
  return Parser(machine, tokens_of(machine, source)).run();
}

}  // namespace fsdp::chat
