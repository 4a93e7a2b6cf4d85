// A parsed template: a tree of nodes.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chat/value.h"

namespace fsdp::chat {

enum class NodeKind {
  // Statements; `body` is what they contain.
  kData,         // text
  kPrint,        // parts[0]
  kSet,          // target parts[0] = parts[1]
  kSetBlock,     // target parts[0]; parts[1]: the filters on kHole, or null
  kIf,           // parts[i]: the test of body[i], which is a kBranch; otherwise: else
  kBranch,       // body
  kFor,          // target parts[0] in parts[1] if parts[2] (or null); otherwise: else
  kMacro,        // text(names[i] = parts[i], or null); `body`
  kCallBlock,    // parts[0]: the call; parts[1]: a kMacro with the body
  kFilterBlock,  // parts[0]: filters on kHole
  kWith,         // target parts[2i] = parts[2i + 1]
  kGeneration,
  kBreak,
  kContinue,
  // Expressions
  kConst,          // value
  kName,           // text
  kNamespaceName,  // text.names[0], only as a target
  kList,           // parts
  kTuple,          // parts
  kDict,           // parts: key, value, key, ...
  kAttribute,      // parts[0].text
  kItem,           // parts[0][parts[1]]
  kSlice,          // parts[0][parts[1]:parts[2]:parts[3]]; each but the first may be null
  kCall,           // parts[0](arguments)
  kFilter,         // parts[0] | text(arguments)
  kTest,           // parts[0] is text(arguments)
  kHole,           // what a filter block filters
  kNot,
  kAnd,
  kOr,
  kNegative,
  kPositive,
  kBinary,   // parts[0] text parts[1]
  kCompare,  // parts[0] names[0] parts[1] names[1] parts[2] ...
  kConcat,
  kChoice,  // parts[0] if parts[1] else parts[2] (or null)
};

struct Node;
using NodePtr = std::unique_ptr<Node>;
using Nodes = std::vector<NodePtr>;

struct Node {
  NodeKind kind;
  int line = 0;
  int depth = 1;  // of nodes in each other
  std::string text;
  Value value;
  std::vector<std::string> names;
  Nodes parts, body, otherwise;
  // Of calls, filters and tests: arguments, names=arguments, *spread, **spread_named.
  Nodes arguments;
  std::vector<std::pair<std::string, NodePtr>> named;
  NodePtr spread, spread_named;
  // Of macros: names that the body uses and that aren't parameters.
  bool uses_varargs = false, uses_kwargs = false, uses_caller = false;
};

}  // namespace fsdp::chat
