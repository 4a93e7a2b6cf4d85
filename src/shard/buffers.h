// Memory for whole units: the ring that gathered units take turns in, and the slots in which whole
// gradients wait for their reduction.
//
// Slots have fixed addresses and are never given back, so memory is the same in every step. A slot
// remembers the moment after which its last content is no longer needed; who takes it next waits
// for that on its own stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "shard/device_stream.h"

namespace fsdp::shard {

class Unit;
struct Group;

inline constexpr size_t kGradientSlots = 2;  // one fills while the other is reduced

struct Slot {
  at::Tensor bytes;
  Unit* tenant = nullptr;
  bool ring = true;  // false: it belongs to one unit
  Moment free_after;
};

struct GradientSlot {
  at::Tensor bytes;
  at::Tensor part;  // a shard's bytes, where reduced gradients leave for host memory from
  bool taken = false;
  bool ring = true;              // false: it belongs to one flat
  const Group* group = nullptr;  // whose ranks can read it
  uint64_t last_use = 0;
  Moment free_after;
};

}  // namespace fsdp::shard
