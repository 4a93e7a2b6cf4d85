#include "chat/expression_parser.h"

namespace fsdp::chat {
namespace {

constexpr std::string_view kComparisons[] = {"==", "!=", "<", "<=", ">", ">="};

}  // namespace

bool ExpressionParser::tuple_ends(std::string_view end) const {
  return now().kind == Token::kVariableEnd || now().kind == Token::kBlockEnd || is_operator(")") ||
         (!end.empty() && is_name(end));
}

NodePtr ExpressionParser::tuple(bool choice, bool brackets, std::string_view end) {
  const int line = now().line;
  Nodes items;
  bool several = false;
  while (!tuple_ends(end)) {
    items.push_back(expression(choice));
    if (!skip_operator(",")) break;
    several = true;
  }
  if (!several && items.size() == 1) return std::move(items[0]);
  if (items.empty() && !brackets) refuse_token("an expression");
  return node(NodeKind::kTuple, line, std::move(items));
}

void ExpressionParser::check_target(const Node& target) {
  if (target.kind == NodeKind::kTuple)
    for (const NodePtr& part : target.parts) check_target(*part);
  else if (target.kind != NodeKind::kName && target.kind != NodeKind::kNamespaceName)
    refuse("only names can be assigned to");
}

NodePtr ExpressionParser::target(bool space, std::string_view end) {
  const int line = now().line;
  Nodes items;
  bool several = false;
  while (!tuple_ends(end)) {
    items.push_back(primary(space));
    if (!skip_operator(",")) break;
    several = true;
  }
  if (items.empty()) refuse_token("a name");
  NodePtr result = several ? node(NodeKind::kTuple, line, std::move(items)) : std::move(items[0]);
  check_target(*result);
  return result;
}

NodePtr ExpressionParser::expression(bool choice) {
  const Nested nested(*this);
  int line = now().line;
  NodePtr value = either();
  while (choice && skip_name("if")) {
    NodePtr condition = either();
    NodePtr otherwise = skip_name("else") ? expression() : nullptr;
    value = made_of(NodeKind::kChoice, line, std::move(value), std::move(condition),
                    std::move(otherwise));
    line = now().line;
  }
  return value;
}

NodePtr ExpressionParser::either() {
  const int line = now().line;
  NodePtr left = both();
  while (skip_name("or")) left = made_of(NodeKind::kOr, line, std::move(left), both());
  return left;
}

NodePtr ExpressionParser::both() {
  const int line = now().line;
  NodePtr left = negation();
  while (skip_name("and")) left = made_of(NodeKind::kAnd, line, std::move(left), negation());
  return left;
}

NodePtr ExpressionParser::negation() {
  const Nested nested(*this);
  const int line = now().line;
  if (skip_name("not")) return made_of(NodeKind::kNot, line, negation());
  return comparison();
}

NodePtr ExpressionParser::comparison() {
  const int line = now().line;
  NodePtr first = sum();
  NodePtr result;
  while (true) {
    std::string sign;
    if (is_name("in")) {
      sign = take().text;
    } else if (is_name("not") && is(ahead(), Token::kName, "in")) {
      take();
      take();
      sign = "not in";
    } else if (now().kind == Token::kOperator &&
               std::find(std::begin(kComparisons), std::end(kComparisons), now().text) !=
                   std::end(kComparisons)) {
      sign = take().text;
    } else {
      break;
    }
    if (!result) result = made_of(NodeKind::kCompare, line, std::move(first));
    result->names.push_back(sign);
    result->parts.push_back(sum());
  }
  return result ? finished(std::move(result)) : std::move(first);
}

NodePtr ExpressionParser::sum() {
  const int line = now().line;
  NodePtr left = concatenation();
  while (is_operator("+") || is_operator("-")) {
    const std::string sign = take().text;
    left = made_of(NodeKind::kBinary, line, std::move(left), concatenation());
    left->text = sign;
  }
  return left;
}

NodePtr ExpressionParser::concatenation() {
  const int line = now().line;
  NodePtr first = product();
  if (!is_operator("~")) return first;
  NodePtr all = made_of(NodeKind::kConcat, line, std::move(first));
  while (skip_operator("~")) all->parts.push_back(product());
  return finished(std::move(all));
}

NodePtr ExpressionParser::product() {
  const int line = now().line;
  NodePtr left = power();
  while (is_operator("*") || is_operator("/") || is_operator("//") || is_operator("%")) {
    const std::string sign = take().text;
    left = made_of(NodeKind::kBinary, line, std::move(left), power());
    left->text = sign;
  }
  return left;
}

NodePtr ExpressionParser::power() {
  const int line = now().line;
  NodePtr left = signed_value(true);
  while (skip_operator("**")) {
    left = made_of(NodeKind::kBinary, line, std::move(left), signed_value(true));
    left->text = "**";
  }
  return left;
}

NodePtr ExpressionParser::signed_value(bool with_filters) {
  const Nested nested(*this);
  const int line = now().line;
  NodePtr value;
  if (skip_operator("-"))
    value = made_of(NodeKind::kNegative, line, signed_value(false));
  else if (skip_operator("+"))
    value = made_of(NodeKind::kPositive, line, signed_value(false));
  else
    value = primary(false);
  value = postfix(std::move(value));
  while (with_filters) {
    if (is_operator("|"))
      value = filters(std::move(value));
    else if (is_name("is"))
      value = test(std::move(value));
    else if (is_operator("("))
      value = postfix(std::move(value));
    else
      break;
  }
  return value;
}

NodePtr ExpressionParser::primary(bool space) {
  const int line = now().line;
  if (now().kind == Token::kName) return constant_or_name(space);
  if (now().kind == Token::kString) return string();
  if (now().kind == Token::kNumber) {
    NodePtr number = node(NodeKind::kConst, line);
    number->value = take().number;
    return number;
  }
  if (skip_operator("(")) {
    NodePtr inner = tuple(true, true);
    expect_operator(")");
    return inner;
  }
  if (is_operator("[")) return list();
  if (is_operator("{")) return dict();
  refuse_token("an expression");
}

NodePtr ExpressionParser::constant_or_name(bool space) {
  const int line = now().line;
  const std::string word = take().text;
  const bool yes = word == "true" || word == "True";
  if (yes || word == "false" || word == "False" || word == "none" || word == "None") {
    NodePtr constant = node(NodeKind::kConst, line);
    constant->value = word == "none" || word == "None" ? Value(None{}) : Value(yes);
    return constant;
  }
  NodePtr result = node(NodeKind::kName, line);
  result->text = word;
  if (names_used_) names_used_->insert(word);
  if (space && skip_operator(".")) {
    result->kind = NodeKind::kNamespaceName;
    result->names.push_back(name());
  }
  return result;
}

NodePtr ExpressionParser::string() {
  NodePtr constant = node(NodeKind::kConst, now().line);
  std::string text = take().text;
  while (now().kind == Token::kString) text += take().text;
  constant->value = std::make_shared<const Text>(std::move(text));
  return constant;
}

NodePtr ExpressionParser::list() {
  const int line = take().line;
  Nodes items;
  while (!is_operator("]")) {
    items.push_back(expression());
    if (!skip_operator(",")) break;
  }
  expect_operator("]");
  return node(NodeKind::kList, line, std::move(items));
}

NodePtr ExpressionParser::dict() {
  const int line = take().line;
  Nodes items;
  while (!is_operator("}")) {
    items.push_back(expression());
    expect_operator(":");
    items.push_back(expression());
    if (!skip_operator(",")) break;
  }
  expect_operator("}");
  return node(NodeKind::kDict, line, std::move(items));
}

NodePtr ExpressionParser::postfix(NodePtr value) {
  while (true) {
    const int line = now().line;
    if (is_operator("(")) {
      value = made_of(NodeKind::kCall, line, std::move(value));
      arguments(*value);
      value = finished(std::move(value));
    } else if (is_operator(".") || is_operator("[")) {
      value = subscript(std::move(value));
    } else {
      return value;
    }
  }
}

NodePtr ExpressionParser::subscript(NodePtr value) {
  const int line = now().line;
  if (skip_operator("[")) {
    NodePtr result = index(std::move(value), line);
    expect_operator("]");
    return result;
  }
  take();  // "."
  if (now().kind == Token::kNumber && now().number.get<int64_t>()) {
    NodePtr number = node(NodeKind::kConst, line);
    number->value = take().number;
    return made_of(NodeKind::kItem, line, std::move(value), std::move(number));
  }
  NodePtr result = made_of(NodeKind::kAttribute, line, std::move(value));
  result->text = name();
  return result;
}

NodePtr ExpressionParser::index(NodePtr value, int line) {
  Nodes parts;
  parts.push_back(std::move(value));
  const auto part = [&] {
    const bool none = is_operator(":") || is_operator("]");
    parts.push_back(none ? nullptr : expression());
  };
  part();
  if (!is_operator(":")) {
    if (!parts[1]) refuse_token("an index");
    if (is_operator(",")) refuse("an index of several values isn't supported");
    return node(NodeKind::kItem, line, std::move(parts));
  }
  while (parts.size() < 4 && skip_operator(":")) part();
  parts.resize(4);
  return node(NodeKind::kSlice, line, std::move(parts));
}

void ExpressionParser::argument(Node& call) {
  if (skip_operator("**")) {
    if (call.spread_named) refuse("a call has two ** arguments");
    call.spread_named = expression();
  } else if (skip_operator("*")) {
    if (call.spread || call.spread_named) refuse("a call's * argument is out of place");
    call.spread = expression();
  } else if (now().kind == Token::kName && is(ahead(), Token::kOperator, "=")) {
    if (call.spread_named) refuse("an argument follows **");
    std::string key = take().text;
    take();
    call.named.emplace_back(std::move(key), expression());
  } else {
    if (call.spread || call.spread_named || !call.named.empty())
      refuse("an argument without a name follows those with one");
    call.arguments.push_back(expression());
  }
}

void ExpressionParser::arguments(Node& call) {
  expect_operator("(");
  while (!is_operator(")")) {
    argument(call);
    if (!skip_operator(",")) break;
  }
  expect_operator(")");
}

NodePtr ExpressionParser::filters(NodePtr input) {
  while (skip_operator("|")) input = filter(std::move(input));
  return input;
}

NodePtr ExpressionParser::filter(NodePtr input) {
  const int line = now().line;
  NodePtr result = made_of(NodeKind::kFilter, line, std::move(input));
  result->text = name();
  if (is_operator("(")) arguments(*result);
  return finished(std::move(result));
}

NodePtr ExpressionParser::test(NodePtr value) {
  const int line = take().line;  // "is"
  const bool negated = skip_name("not");
  NodePtr result = made_of(NodeKind::kTest, line, std::move(value));
  result->text = name();
  const bool has_value = now().kind == Token::kName || now().kind == Token::kString ||
                         now().kind == Token::kNumber || is_operator("[") || is_operator("{");
  if (is_operator("(")) {
    arguments(*result);
  } else if (has_value && !is_name("else") && !is_name("or") && !is_name("and")) {
    if (is_name("is")) refuse("tests can't be chained with \"is\"");
    if (!is_name("if")) result->arguments.push_back(postfix(primary(false)));
  }
  result = finished(std::move(result));
  return negated ? made_of(NodeKind::kNot, line, std::move(result)) : std::move(result);
}

}  // namespace fsdp::chat
