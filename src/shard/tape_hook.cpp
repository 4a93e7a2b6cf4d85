#include "shard/tape_hook.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "shard/deferred_tape.h"
#include "shard/runtime.h"

namespace fsdp::shard {

TapeHooks* tape_hooks() {
  return runtime().tape_hooks.load(std::memory_order_acquire);
}

void set_tape_hooks(TapeHooks* hooks) {
  runtime().tape_hooks.store(hooks, std::memory_order_release);
}

TapeHook* tape_hook() {
  TapeHooks* hooks = tape_hooks();
  if (!hooks) return nullptr;
  std::unique_ptr<TapeHook>& tape = this_thread().tape;
  if (!tape) tape = hooks->for_thread();
  return tape.get();
}

void set_taping(bool on) {
  ThreadState& thread = this_thread();
  thread.taping = on;
  c10::impl::tls_set_dispatch_key_included(deferred::kRecordKey, on || thread.deferring > 0);
  check_in_debug();
}

bool shown() {
  return taping() && !c10::impl::tls_is_dispatch_key_excluded(deferred::kRecordKey);
}

ViewsOnly::ViewsOnly() : hides_(shown()) {
  if (hides_) c10::impl::tls_set_dispatch_key_excluded(deferred::kRecordKey, true);
}

ViewsOnly::~ViewsOnly() {
  if (hides_) c10::impl::tls_set_dispatch_key_excluded(deferred::kRecordKey, false);
}

}  // namespace fsdp::shard
