#include "shard/runtime.h"

#include "shard/model.h"
#include "shard/unit.h"

namespace fsdp::shard {

Runtime& runtime() {
  static auto* state = new Runtime;
  return *state;
}

}  // namespace fsdp::shard
