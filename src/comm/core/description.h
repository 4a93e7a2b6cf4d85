// Description: a summary of the call a rank is about to make, small enough to send to every other
// rank first. Ranks that disagree get an error that shows both calls instead of a hang or garbage.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "comm/core/reduce.h"

namespace fsdp::comm {

enum class Operation : uint8_t {
  kNone,
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kAllToAll,
  kBarrier,
  kAllocate
};

const char* name(Operation operation);

struct Description {
  Operation operation = Operation::kNone;
  c10::ScalarType type = c10::ScalarType::Byte;
  ReduceOp reduce = ReduceOp::SUM;
  uint8_t path = 0;      // how the data travels, if there are several ways; ranks must agree
  int32_t root = 0;      // broadcast
  int64_t count = 0;     // elements of all_gather's input, reduce_scatter's output, or the tensor
  int64_t identity = 0;  // what the caller is working on; ranks must agree
  char label[48] = {};   // the same as text, e.g. a unit's name; not compared

  bool agrees_with(const Description& other) const;
  std::string text(
      bool with_label = true) const;  // "all_gather of 1,024 float32", "… for layers.7"
};

// While alive, descriptions made on this thread carry the label ("unit layers.7") and identity.
class ScopedLabel {
 public:
  explicit ScopedLabel(std::string_view label, int64_t identity = 0);
  ~ScopedLabel();
  ScopedLabel(const ScopedLabel&) = delete;
  ScopedLabel& operator=(const ScopedLabel&) = delete;

  static std::string_view current();
  static int64_t identity();

 private:
  std::string previous_;
  int64_t previous_identity_;
};

Description describe(Operation operation, c10::ScalarType type, int64_t count,
                     ReduceOp reduce = ReduceOp::SUM, int root = 0);

}  // namespace fsdp::comm
