// Reductions in fewer bits: an all-to-all of rounded parts, then a sum in float32 in rank order.
#include <ATen/ops/empty.h>

#include <algorithm>

#include "kernels/wire.h"
#include "shard/comm_context.h"
#include "shard/gradient_reducer.h"
#include "shard/offload.h"
#include "shard/unit.h"

namespace fsdp::shard {
namespace {

// All messages of a reduction, to or from every rank; 0 if it isn't in fewer bits.
int64_t coded_bytes(const Flat& flat) {
  const Group& group = *flat.unit().group;
  const bool coded = flat.trainable() && flat.reduce_wire() != Wire::PLAIN && group.shard_size > 1;
  return coded ? group.shard_size * flat.reduce_message_bytes() : 0;
}

// Whether the gradient can be sent as it is.
bool is_code(const Flat& flat) {
  return flat.reduce_wire() == Wire::BF16 && flat.reduce_dtype() == at::kBFloat16;
}

}  // namespace

// Memory for the messages of any flat, so that it isn't made in the middle of a backward.
void GradientReducer::make_messages() {
  int64_t sent = 0, received = 0;
  for (const Flat* flat : flats_of(units_)) {
    received = std::max(received, coded_bytes(*flat));
    if (!is_code(*flat)) sent = std::max(sent, coded_bytes(*flat));
  }
  const auto options = at::TensorOptions().dtype(at::kByte).device(comm_.device());
  const auto grow = [&](at::Tensor& messages, int64_t bytes) {
    if (bytes > 0 && (!messages.defined() || messages.numel() < bytes))
      messages = at::empty({bytes}, options);
  };
  grow(sent_, sent);
  grow(received_, received);
}

at::Tensor GradientReducer::scatter_coded(Flat& flat) {
  const Group& group = *flat.unit().group;
  const Wire wire = flat.reduce_wire();
  const at::Tensor& full = flat.slot_view();
  const int64_t bytes = coded_bytes(flat), numel = flat.layout().shard_numel();
  make_messages();
  at::Tensor sent = is_code(flat) ? full.view(at::kByte) : sent_.narrow(0, 0, bytes);
  at::Tensor received = received_.narrow(0, 0, bytes);
  if (!is_code(flat)) kernels::encode_wire(full, sent, group.shard_size, wire);
  const std::string label = label_of(flat.unit());
  // In words of 8 bytes, because MPI counts to 2^31.
  comm_.run([&] {
    return group.reduce.all_to_all(received.view(at::kLong), sent.view(at::kLong), {}, {},
                                   {.label = label, .identity = flat.unit().id + 1});
  });
  comm_.traffic().reduce_scatter += flat.reduce_message_bytes() * (group.shard_size - 1);

  // Replicas are summed in reduce_dtype, and the host receives it.
  const bool direct = !flat.grad.defined() && flat.grad_dtype() != at::kDouble;
  at::Tensor reduced = gradient_on_host(flat)     ? leaving_part(flat)
                       : group.replicate_size > 1 ? at::empty({numel}, full.options())
                       : direct                   ? flat.grad_memory
                                : at::empty({numel}, full.options().dtype(at::kFloat));
  const bool average = op() == ReduceOp::AVG;
  kernels::sum_wire(received, reduced, group.shard_size,
                    average ? static_cast<float>(group.shard_size) : 1.0f, wire);
  return reduced;
}

}  // namespace fsdp::shard
