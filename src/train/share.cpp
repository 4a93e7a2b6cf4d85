#include "train/share.h"

#include "fsdp/mesh.h"
#include "nn/context_attention.h"

namespace fsdp::train {

ContextKind context_kind(const Config& config) {
  if (config.context.kind != nn::ContextChoice::kAuto)
    return config.context.kind == nn::ContextChoice::kRing ? ContextKind::RING
                                                           : ContextKind::ULYSSES;
  return heads_can_be_exchanged(config) ? ContextKind::ULYSSES : ContextKind::RING;
}

bool heads_can_be_exchanged(const Config& config) {
  const int64_t heads = config.model.heads, keys = config.model.kv_heads;
  return nn::can_exchange(heads, keys > 0 ? keys : heads, config.context.size);
}

Context context_of(const World& world, const Config& config) {
  const auto size = static_cast<int>(config.context.size);
  if (size == 1) return {};
  const DeviceMesh mesh(world, {{"samples", world.size() / size}, {"context", size}});
  return Context(mesh.comm("context"), context_kind(config));
}

}  // namespace fsdp::train
