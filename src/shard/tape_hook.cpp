#include "shard/tape_hook.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>

#include "shard/deferred_tape.h"

namespace fsdp::shard {
namespace {

std::atomic<TapeHook*> the_hook{nullptr};
thread_local bool is_taping = false, is_packing = false;

}  // namespace

thread_local bool GraphWanted::wanted_ = false;
thread_local bool InGraph::is_ = false;

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

bool shown() {
  return is_taping && !c10::impl::tls_is_dispatch_key_excluded(deferred::kRecordKey);
}

ViewsOnly::ViewsOnly() : hides_(shown()) {
  if (hides_) c10::impl::tls_set_dispatch_key_excluded(deferred::kRecordKey, true);
}

ViewsOnly::~ViewsOnly() {
  if (hides_) c10::impl::tls_set_dispatch_key_excluded(deferred::kRecordKey, false);
}

bool packing() {
  return is_packing;
}

void set_packing(bool on) {
  is_packing = on;
}

}  // namespace fsdp::shard
