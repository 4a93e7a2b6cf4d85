#include "shard/tape_hook.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>

#include "shard/deferred_tape.h"

namespace fsdp::shard {
namespace {

std::atomic<TapeHook*> the_hook{nullptr};
thread_local bool is_taping = false;

}  // namespace

thread_local bool GraphWanted::wanted_ = false;

TapeHook* tape_hook() {
  return the_hook.load(std::memory_order_acquire);
}

void set_tape_hook(TapeHook* hook) {
  the_hook.store(hook, std::memory_order_release);
}

bool taping() {
  return is_taping;
}

void set_taping(bool on) {
  is_taping = on;
  c10::impl::tls_set_dispatch_key_included(deferred::kRecordKey, on);
}

}  // namespace fsdp::shard
