#include "shard/thread_state.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <stdexcept>

#include "shard/deferred_tape.h"
#include "shard/tape_hook.h"

namespace fsdp::shard {

ThreadState::ThreadState() = default;
ThreadState::~ThreadState() = default;

ThreadState& this_thread() {
  static thread_local ThreadState state;
  return state;
}

void check(const ThreadState& state) {
  const bool graph = state.in_graph || state.records_step;
  if (graph && state.deferring > 0)
    throw std::logic_error("a thread defers operators while it records a graph");
  if (graph && state.dry_run.as != DryRunState::As::kNone)
    throw std::logic_error("a thread records a graph in a dry run");
  if (c10::impl::tls_is_dispatch_key_included(deferred::kRecordKey) !=
      (state.deferring > 0 || state.taping))
    throw std::logic_error("a thread's record key doesn't match what the thread does");
}

}  // namespace fsdp::shard
