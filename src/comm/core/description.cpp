#include "comm/core/description.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>

#include "base/format.h"
#include "base/table.h"

namespace fsdp::comm {
namespace {

thread_local std::string t_label;
thread_local int64_t t_identity = 0;

// As PyTorch's users write them.
std::string type_name(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float:
      return "float32";
    case c10::ScalarType::Double:
      return "float64";
    case c10::ScalarType::Half:
      return "float16";
    case c10::ScalarType::BFloat16:
      return "bfloat16";
    case c10::ScalarType::Byte:
      return "uint8";
    case c10::ScalarType::Char:
      return "int8";
    case c10::ScalarType::Short:
      return "int16";
    case c10::ScalarType::Int:
      return "int32";
    case c10::ScalarType::Long:
      return "int64";
    default:
      return c10::toString(type);
  }
}

}  // namespace

const char* name(Operation operation) {
  constexpr const char* kNames[] = {"nothing",   "all_gather", "reduce_scatter", "all_reduce",
                                    "broadcast", "all_to_all", "barrier",        "allocate"};
  return kNames[static_cast<int>(operation)];
}

bool Description::agrees_with(const Description& other) const {
  return operation == other.operation && type == other.type && reduce == other.reduce &&
         path == other.path && root == other.root && count == other.count &&
         identity == other.identity;
}

std::string Description::text(bool with_label) const {
  std::string out = name(operation);
  if (operation == Operation::kReduceScatter || operation == Operation::kAllReduce)
    out += "(" + std::string(name(reduce)) + ")";
  if (operation == Operation::kAllocate) {
    out += " of " + with_separators(count) + " bytes";
  } else if (operation != Operation::kBarrier && operation != Operation::kNone) {
    out += " of " + with_separators(count) + " " + type_name(type);
    if (operation == Operation::kBroadcast) out += formatted(" from rank {}", root);
    if (path) out += path == 1 ? " in shared memory" : " in place in shared memory";
  }
  if (*label && with_label) out += " for " + std::string(label);
  if (identity != 0 && !with_label) out += formatted(" #{}", identity);
  return out;
}

ScopedLabel::ScopedLabel(std::string_view label, int64_t identity)
    : previous_(std::move(t_label)), previous_identity_(t_identity) {
  t_label = label;
  t_identity = identity;
}

ScopedLabel::~ScopedLabel() {
  t_label = std::move(previous_);
  t_identity = previous_identity_;
}

std::string_view ScopedLabel::current() {
  return t_label;
}

int64_t ScopedLabel::identity() {
  return t_identity;
}

Description describe(Operation operation, c10::ScalarType type, int64_t count, ReduceOp reduce,
                     int root) {
  Description description;
  description.operation = operation;
  description.type = type;
  description.count = count;
  description.reduce = reduce;
  description.root = root;
  description.identity = ScopedLabel::identity();
  std::string_view label = ScopedLabel::current();
  std::memcpy(description.label, label.data(),
              std::min(label.size(), sizeof description.label - 1));
  return description;
}

}  // namespace fsdp::comm
