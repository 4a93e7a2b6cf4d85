// deferred_init: builds a module without memory for its parameters.
//
//   auto model = fsdp::deferred_init([] { return Llama(config); });
//   auto sharded = fsdp::fully_shard(model, {…});    // each rank keeps its shard, unit by unit
//
// The weights are, bit for bit, those of plain construction with the same seed, on any number of
// ranks, and at no time does more than one parameter exist whole (while recording, random
// initialisers run once on scratch memory so that the generator ends where it would have). A
// parameter that is read without being sharded gets its memory then.
#pragma once

#include <utility>

namespace fsdp {

class DeferredScope {  // what deferred_init is inside; on for this thread while alive
 public:
  DeferredScope();
  ~DeferredScope();
  DeferredScope(const DeferredScope&) = delete;
  DeferredScope& operator=(const DeferredScope&) = delete;
};

template <typename Build>
auto deferred_init(Build&& build) {
  DeferredScope scope;
  return std::forward<Build>(build)();
}

}  // namespace fsdp
