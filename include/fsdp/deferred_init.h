/// @file
/// Builds a module without memory for its parameters.
///
///     auto model = fsdp::deferred_init([] { return Llama(config); });
///     auto sharded = fsdp::fully_shard(model, {…});    // each rank keeps its shard, unit by unit
///
/// The weights have the same bits as plain construction with the same seed, on any number of ranks,
/// and at most one parameter is whole at a time. (While recording, random initializers run once on
/// scratch memory, so that the generator advances as usual.) Reading a parameter before it is
/// sharded gives it memory.
#pragma once

#include <utility>

namespace fsdp {

/// While alive, modules that this thread builds get no memory. deferred_init() uses it.
class DeferredScope {
 public:
  /// Starts recording.
  DeferredScope();
  /// Stops recording.
  ~DeferredScope();
  DeferredScope(const DeferredScope&) = delete;
  DeferredScope& operator=(const DeferredScope&) = delete;
};

/// Returns build(), recorded instead of run.
template <typename Build>
auto deferred_init(Build&& build) {
  DeferredScope scope;
  return std::forward<Build>(build)();
}

}  // namespace fsdp
