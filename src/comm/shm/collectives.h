// Collectives over plain memory in a shared-memory group. Blocking; every rank makes the same call.
//
// With S bytes in the full buffer and W ranks, each rank moves this through memory, beyond what it
// must read and write. Left: buffers in shared memory (Group::allocate). Right: private buffers,
// staged in rounds of 64 KiB.
//   all_gather      in place: nothing, one wait    | S/W in, S/W per peer out
//   reduce_scatter  S read directly, S/W written   | S(W-1)/W in, S(W-1)/W read
//   all_reduce      S read, S written to the peers | reduce_scatter, then all_gather
//   broadcast       as private                     | S in at the root, S out elsewhere
//   all_to_all      as private                     | as reduce_scatter
// An all_reduce of at most 8 KiB takes one round: every rank reads and adds everything itself.
// Sums are in rank order on every path.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/core/reduce.h"
#include "comm/shm/group.h"

namespace fsdp::comm::shm {

// in: [count], out: [size][count]; `in` may be this rank's part of `out`.
void all_gather(Group& group, void* out, const void* in, int64_t count, c10::ScalarType type);

// in: [size][count], out: [count]; `out` may be this rank's part of `in`.
void reduce_scatter(Group& group, void* out, const void* in, int64_t count, c10::ScalarType type,
                    ReduceOp op, const Parallel& parallel);

void all_reduce(Group& group, void* data, int64_t count, c10::ScalarType type, ReduceOp op,
                const Parallel& parallel);

void broadcast(Group& group, void* data, int64_t count, c10::ScalarType type, int root);

// Part p of `in` (in_counts[p] elements) goes to rank p; part p of `out` comes from rank p.
void all_to_all(Group& group, void* out, const std::vector<int64_t>& out_counts, const void* in,
                const std::vector<int64_t>& in_counts, c10::ScalarType type);

void barrier(Group& group);

}  // namespace fsdp::comm::shm
