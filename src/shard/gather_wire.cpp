// What gathers in fewer bits receive, and what reshard_after_forward = n keeps of any gather.
#include <ATen/ops/empty.h>

#include <algorithm>

#include "kernels/wire.h"
#include "shard/comm_context.h"
#include "shard/dry_run.h"
#include "shard/gatherer.h"

namespace fsdp::shard {

// Memory for the flat's messages, one per rank. On a GPU the gathers of all units take turns on one
// stream, so one buffer is enough; on the CPU several may be under way.
at::Tensor Gatherer::codes_of(const Unit& unit, const Flat& flat, Slot& slot) {
  const at::Device device = comm_.device();
  const bool in_turn = dry_run::like_gpu(device);
  at::Tensor& codes = in_turn ? codes_ : slot.codes;
  int64_t bytes = unit.coded_bytes();
  if (!codes.defined() || codes.numel() < bytes) {
    // Once for all units that may use it, so that its address stays.
    if (in_turn || slot.ring)
      for (const auto& other : units_)
        if (in_turn || !other->root) bytes = std::max(bytes, other->coded_bytes());
    codes = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  }
  int64_t at = 0;
  for (const auto& other : unit.flats) {
    const bool coded = other->gather_wire() != Wire::PLAIN;
    const int64_t size = coded ? unit.group->shard_size * other->gather_message_bytes() : 0;
    if (other.get() == &flat) return codes.narrow(0, at, size);
    at += size;
  }
  return {};
}

// Fills the full buffer from messages that have arrived. With reshard_after_forward = n this rank's
// part of them is kept.
void Gatherer::decode(const Unit& unit, Flat& flat, const at::Tensor& full, Slot& slot) {
  const at::Tensor codes = codes_of(unit, flat, slot);
  kernels::decode_wire(codes, full, unit.group->shard_size, flat.gather_wire());
  if (in_backward_ || unit.keep_parts <= 1 || flat.secondary_valid) return;
  const int64_t bytes = codes.numel() / unit.keep_parts;
  if (!flat.secondary.defined()) flat.secondary = at::empty({bytes}, codes.options());
  const int64_t place = unit.group->shard_rank % unit.keep_parts;
  flat.secondary.copy_(codes.narrow(0, place * bytes, bytes));
  flat.secondary_valid = true;
}

void Gatherer::keep_secondary(Unit& unit) {
  for (const auto& flat : unit.flats) {
    if (flat->gather_wire() != Wire::PLAIN) continue;  // kept by decode()
    int64_t numel = flat->layout().full_numel() / unit.keep_parts;
    if (!flat->secondary.defined())
      flat->secondary = at::empty({numel}, flat->shard.options().device(comm_.device()));
    int64_t place = unit.group->shard_rank % unit.keep_parts;
    flat->secondary.copy_(unit.full_view(*flat, unit.slot->bytes).narrow(0, place * numel, numel));
    flat->secondary_valid = true;
  }
  comm_.shards_written();
}

}  // namespace fsdp::shard
