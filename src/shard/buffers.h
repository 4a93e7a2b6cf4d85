// Memory for full units: the ring of slots that gathered units take turns in, and the slots in
// which full gradients wait for their reduction.
//
// Slots have fixed addresses and are reused, so memory is the same in every step. A slot keeps the
// stream event after which its last content is no longer needed; the next user waits for it on its
// own stream.
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
  at::Tensor
      codes;  // what gathers receive in fewer bits; on a GPU, the gatherer's are used instead
  Unit* tenant = nullptr;
  bool ring = true;  // false: it belongs to one unit
  StreamEvent free_after;
};

struct GradientSlot {
  at::Tensor bytes;
  at::Tensor part;  // shard-sized; reduced gradients are copied to host memory from here
  bool taken = false;
  bool ring = true;              // false: it belongs to one flat
  bool coded = false;            // for flats that travel in fewer bits, or for others
  bool shared = false;           // in memory that the other ranks of the host read
  const Group* group = nullptr;  // whose ranks can read it
  uint64_t last_use = 0;
  StreamEvent free_after;
};

}  // namespace fsdp::shard
