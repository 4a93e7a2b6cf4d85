// Evaluator: walks a tree and writes the text.
#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chat/ast.h"
#include "chat/function.h"
#include "chat/machine.h"

namespace fsdp::chat {

// Variables that are seen together. A loop's body, a macro's and a few blocks have one of their
// own.
class Scope {
 public:
  explicit Scope(std::shared_ptr<Scope> around) : around_(std::move(around)) {}

  const Value* find(std::string_view name) const;
  void set(const std::string& name, Value value);
  bool outermost() const { return !around_; }
  // The message whose turn it is, or -1.
  int32_t turn() const;
  int32_t own_turn = -1;

 private:
  std::shared_ptr<Scope> around_;
  std::vector<std::pair<std::string, Value>> variables_;
};
using ScopePtr = std::shared_ptr<Scope>;

enum class Flow { kOn, kBreak, kContinue };

class Evaluator {
 public:
  Evaluator(Machine& machine, std::tm now) : machine_(machine), now_(now) {}
  ~Evaluator();
  Evaluator(const Evaluator&) = delete;
  Evaluator& operator=(const Evaluator&) = delete;

  // Everything that the template writes with these variables.
  Text run(const Nodes& body, std::vector<std::pair<std::string, Value>> variables);

  Machine& machine() { return machine_; }
  Value filtered(const std::string& name, const Value& input, const Arguments& arguments);
  bool tested(const std::string& name, const Value& input, const Arguments& arguments);

 private:
  Flow run(const Nodes& statements, const ScopePtr& scope, Text& out);
  Flow statement(const Node& node, const ScopePtr& scope, Text& out);
  Flow choose(const Node& node, const ScopePtr& scope, Text& out);
  Flow loop(const Node& node, const ScopePtr& scope, Text& out);
  Values loop_items(const Node& node, const ScopePtr& scope);
  void set_block(const Node& node, const ScopePtr& scope);
  void call_block(const Node& node, const ScopePtr& scope, Text& out);
  void write(Text text, const ScopePtr& scope, Text& out);
  Text captured(const Nodes& body, const ScopePtr& scope);
  void assign(const Node& target, const Value& value, const ScopePtr& scope);
  void set_attribute(const Node& target, const Value& value, const ScopePtr& scope);

  Value evaluate(const Node& node, const ScopePtr& scope);
  Value evaluate_values(const Node& node, const ScopePtr& scope);
  Value evaluate_operators(const Node& node, const ScopePtr& scope);
  Value slice(const Node& node, const ScopePtr& scope);
  Value compare(const Node& node, const ScopePtr& scope);
  Value concatenate(const Node& node, const ScopePtr& scope);
  Value named(const std::string& name, const ScopePtr& scope);
  Arguments arguments_of(const Node& call, const ScopePtr& scope);
  Value call(const Value& callee, const Arguments& arguments);
  Value call_macro(const Function& macro, const Arguments& arguments);
  void bind(const Function& macro, const Arguments& arguments, const ScopePtr& inside);
  Value call_global(const std::string& name, const Arguments& arguments);
  Value new_namespace(const Arguments& arguments);
  Value macro_value(const Node& node, const ScopePtr& scope);

  Machine& machine_;
  std::tm now_;
  const Text* root_ = nullptr;                      // what is written in the end
  std::vector<Value> holes_;                        // what filter blocks filter
  std::vector<ScopePtr> kept_;                      // scopes of macros
  std::vector<std::shared_ptr<Namespace>> spaces_;  // may hold each other
};

// Filters by kind; nullopt if `name` isn't one of them.
std::optional<Value> text_filter(Evaluator& evaluator, const std::string& name, const Value& input,
                                 const Arguments& arguments);
std::optional<Value> number_filter(Evaluator& evaluator, const std::string& name,
                                   const Value& input, const Arguments& arguments);
std::optional<Value> list_filter(Evaluator& evaluator, const std::string& name, const Value& input,
                                 const Arguments& arguments);
std::optional<Value> choosing_filter(Evaluator& evaluator, const std::string& name,
                                     const Value& input, const Arguments& arguments);

}  // namespace fsdp::chat
