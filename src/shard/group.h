// Group: the ranks that units are sharded over and replicated across, and their communicators.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "fsdp/communicator.h"
#include "fsdp/mesh.h"
#include "fsdp/sharding.h"

namespace fsdp {
struct ShardOptions;
}

namespace fsdp::shard {

// The ranks a unit is sharded over. Gathers and reductions have separate communicators, so that
// neither waits in the other's queue.
struct Group {
  DeviceMesh mesh;
  int number = 0;    // identifies a group of a world; the same on every rank
  std::string text;  // "shard=4"
  int shard_size = 1, shard_rank = 0;
  int replicate_size = 1;
  Communicator gather, reduce;  // along "shard"
  Communicator replicate;       // along "replicate"
  bool shares_memory = false;   // all ranks of `gather` are on one host, over shm
  // The ranks that keep 1/parts of a unit each (reshard_after_forward = n). The first call for a
  // number of parts creates the communicator, which is collective. `parts` divides shard_size.
  const Communicator& neighbours(int parts);

 private:
  Mutex mutex_;  // models that share the group have locks of their own
  std::map<int, Communicator> neighbours_ FSDP_GUARDED_BY(mutex_);
};

// The group for these options, or an Error if their mesh doesn't suit their strategy. Models with
// the same default mesh share one, so a model sharded bottom-up has one set of communicators.
std::shared_ptr<Group> group_for(const World& world, const ShardOptions& options,
                                 at::Device device);

// How much of a unit each rank keeps after forward: 0 nothing but its shard, 1 everything,
// n 1/n. `keeps` is the default of a choice that leaves it open. Throws an Error unless n divides
// the number of ranks that share a unit; n equal to that number keeps nothing but the shard.
int parts_kept(const ReshardAfterForward& choice, bool keeps, const Group& group);

}  // namespace fsdp::shard
