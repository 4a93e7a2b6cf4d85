// Share: which part of every batch a rank takes: some of the samples, and some tokens of each.
#pragma once

#include "fsdp/context_parallel.h"
#include "fsdp/world.h"
#include "train/config.h"

namespace fsdp::train {

struct Share {
  // One of `world`'s equal parts, of whole samples.
  Share(const World& world) : rank(world.rank()), ranks(world.size()) {}  // NOLINT: implicit
  // Neighbouring ranks have the same samples, and share their tokens.
  Share(const World& world, const Context& shared)
      : rank(world.rank() / shared.size()), ranks(world.size() / shared.size()), context(shared) {}

  int rank, ranks;  // of those with other samples
  Context context;
};

// Parts of a batch of samples: groups of ranks that share sequences.
inline int64_t parts_of_batch(const Config& config, int world) {
  return world / config.context.size;
}

// Whether all-to-alls can give each rank some of the heads.
bool heads_can_be_exchanged(const Config& config);
// context.kind; "auto" is decided by the heads.
ContextKind context_kind(const Config& config);

// The ranks that share this rank's sequences, by context.size. Collective.
Context context_of(const World& world, const Config& config);

}  // namespace fsdp::train
