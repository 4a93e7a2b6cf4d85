// The statements of a template.
#include <algorithm>

#include "base/format.h"
#include "chat/evaluator.h"
#include "chat/print.h"

namespace fsdp::chat {

const Value* Scope::find(std::string_view name) const {
  for (const Scope* scope = this; scope; scope = scope->around_.get())
    for (const auto& [key, value] : scope->variables_)
      if (key == name) return &value;
  return nullptr;
}

void Scope::set(const std::string& name, Value value) {
  for (auto& [key, there] : variables_) {
    if (key != name) continue;
    there = std::move(value);
    return;
  }
  variables_.emplace_back(name, std::move(value));
}

int32_t Scope::turn() const {
  for (const Scope* scope = this; scope; scope = scope->around_.get())
    if (scope->own_turn >= 0) return scope->own_turn;
  return -1;
}

Evaluator::~Evaluator() {
  for (auto& space : spaces_) space->items.clear();
}

Text Evaluator::run(const Nodes& body, std::vector<std::pair<std::string, Value>> variables) {
  auto scope = std::make_shared<Scope>(nullptr);
  for (auto& [name, value] : variables) scope->set(name, std::move(value));
  kept_.push_back(scope);
  Text out;
  root_ = &out;
  run(body, scope, out);
  return out;
}

Flow Evaluator::run(const Nodes& statements, const ScopePtr& scope, Text& out) {
  for (const NodePtr& node : statements) {
    const Flow flow = statement(*node, scope, out);
    if (flow != Flow::kOn) return flow;
  }
  return Flow::kOn;
}

void Evaluator::write(Text text, const ScopePtr& scope, Text& out) {
  machine_.make(text.size());
  if (&out == root_) machine_.output(text.size());
  text.write_in(scope->turn(), false);
  out.append(text);
}

// What a block writes, in a scope of its own.
Text Evaluator::captured(const Nodes& body, const ScopePtr& scope) {
  Text out;
  run(body, std::make_shared<Scope>(scope), out);
  return out;
}

Flow Evaluator::statement(const Node& node, const ScopePtr& scope, Text& out) {
  const Machine::Inside inside(machine_);
  machine_.line = node.line;
  switch (node.kind) {
    case NodeKind::kData:
      write(*node.value.text(), scope, out);
      break;
    case NodeKind::kPrint:
      write(printed(machine_, evaluate(*node.parts[0], scope)), scope, out);
      break;
    case NodeKind::kSet:
      assign(*node.parts[0], evaluate(*node.parts[1], scope), scope);
      break;
    case NodeKind::kSetBlock:
      set_block(node, scope);
      break;
    case NodeKind::kIf:
      return choose(node, scope, out);
    case NodeKind::kFor:
      return loop(node, scope, out);
    case NodeKind::kMacro:
      scope->set(node.text, macro_value(node, scope));
      break;
    case NodeKind::kCallBlock:
      call_block(node, scope, out);
      break;
    case NodeKind::kFilterBlock:
      holes_.push_back(make_text(machine_, captured(node.body, scope)));
      write(printed(machine_, evaluate(*node.parts[0], scope)), scope, out);
      holes_.pop_back();
      break;
    case NodeKind::kWith: {
      auto own = std::make_shared<Scope>(scope);
      for (size_t i = 0; i < node.parts.size(); i += 2)
        assign(*node.parts[i], evaluate(*node.parts[i + 1], scope), own);
      return run(node.body, own, out);
    }
    case NodeKind::kGeneration: {
      Text text = captured(node.body, scope);
      text.write_in(scope->turn(), true);
      write(std::move(text), scope, out);
      break;
    }
    case NodeKind::kBreak:
      return Flow::kBreak;
    case NodeKind::kContinue:
      return Flow::kContinue;
    default:
      machine_.refuse("the template has a statement that isn't one");
  }
  return Flow::kOn;
}

Flow Evaluator::choose(const Node& node, const ScopePtr& scope, Text& out) {
  for (size_t i = 0; i < node.parts.size(); ++i)
    if (truth(evaluate(*node.parts[i], scope))) return run(node.body[i]->body, scope, out);
  return run(node.otherwise, scope, out);
}

Values Evaluator::loop_items(const Node& node, const ScopePtr& scope) {
  Values items = items_of(machine_, evaluate(*node.parts[1], scope));
  if (!node.parts[2]) return items;
  Values chosen;
  for (Value& item : items) {
    machine_.step();
    auto own = std::make_shared<Scope>(scope);
    assign(*node.parts[0], item, own);
    if (truth(evaluate(*node.parts[2], own))) chosen.push_back(std::move(item));
  }
  return chosen;
}

Flow Evaluator::loop(const Node& node, const ScopePtr& scope, Text& out) {
  const Values items = loop_items(node, scope);
  auto state = std::make_shared<Loop>();
  state->items = &items;
  struct Ending {
    Loop& loop;
    ~Ending() { loop.items = nullptr; }
  } const ending{*state};
  const std::shared_ptr<const Loop> shown = state;
  for (; state->at < items.size(); ++state->at) {
    machine_.step();
    auto own = std::make_shared<Scope>(scope);
    const Value& item = items[state->at];
    if (const Dict* dict = item.dict()) own->own_turn = dict->message;
    own->set("loop", shown);
    machine_.line = node.line;
    assign(*node.parts[0], item, own);
    if (run(node.body, own, out) == Flow::kBreak) break;
  }
  if (!items.empty() || node.otherwise.empty()) return Flow::kOn;
  return run(node.otherwise, std::make_shared<Scope>(scope), out);
}

void Evaluator::set_block(const Node& node, const ScopePtr& scope) {
  Value value = make_text(machine_, captured(node.body, scope));
  if (node.parts[1]) {
    holes_.push_back(value);
    value = evaluate(*node.parts[1], scope);
    holes_.pop_back();
  }
  assign(*node.parts[0], value, scope);
}

void Evaluator::call_block(const Node& node, const ScopePtr& scope, Text& out) {
  const Node& call_node = *node.parts[0];
  Arguments arguments = arguments_of(call_node, scope);
  arguments.named.emplace_back("caller", macro_value(*node.parts[1], scope));
  const Value callee = evaluate(*call_node.parts[0], scope);
  machine_.line = node.line;
  write(printed(machine_, call(callee, arguments)), scope, out);
}

void Evaluator::set_attribute(const Node& target, const Value& value, const ScopePtr& scope) {
  const Value* there = scope->find(target.text);
  const auto* space = there ? there->get<std::shared_ptr<Namespace>>() : nullptr;
  if (!space)
    machine_.refuse(formatted("\"{}\" isn't a namespace, so \"{}.{}\" can't be set", target.text,
                              target.text, target.names[0]));
  const std::string& name = target.names[0];
  if (name.starts_with("_"))
    machine_.refuse(formatted("a namespace can't have \"{}\": it begins with _", name));
  machine_.make(sizeof(Value));
  auto& items = (*space)->items;
  const auto old = std::find_if(items.begin(), items.end(),
                                [&](const auto& item) { return item.first == name; });
  if (old != items.end())
    old->second = value;
  else
    items.emplace_back(name, value);
}

void Evaluator::assign(const Node& target, const Value& value, const ScopePtr& scope) {
  if (target.kind == NodeKind::kNamespaceName) return set_attribute(target, value, scope);
  if (target.kind == NodeKind::kName) {
    machine_.make(sizeof(Value));
    // A message that a loop over numbers takes begins its turn.
    if (const Dict* dict = value.dict(); dict && dict->message >= 0 && !scope->outermost())
      if (scope->turn() < 0) scope->own_turn = dict->message;
    return scope->set(target.text, value);
  }
  const Values items = items_of(machine_, value);
  if (items.size() != target.parts.size())
    machine_.refuse(
        formatted("{} values can't be assigned to {} names", items.size(), target.parts.size()));
  for (size_t i = 0; i < items.size(); ++i) assign(*target.parts[i], items[i], scope);
}

}  // namespace fsdp::chat
