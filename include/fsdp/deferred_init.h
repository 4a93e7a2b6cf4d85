/// @file
/// Builds a module without memory for its parameters.
///
///     auto model = fsdp::deferred_init([] { return Llama(config); });
///     auto sharded = fsdp::fully_shard(model, {…});    // each rank keeps its shard, unit by unit
///
/// The weights have the same bits as plain construction with the same seed, on any number of ranks,
/// and at most one parameter is whole at a time. torch's generators end up where plain construction
/// leaves them. On the CPU, normal and uniform initializers draw nothing while recording. Sharding
/// then draws each rank's part, on all cores; values that are overwritten are never drawn. Reading
/// a parameter before it is sharded gives it memory.
#pragma once

#include <utility>

namespace fsdp {

/// Options of deferred_init().
struct DeferredOptions {
  /// False: random initializers draw nothing and leave the generators alone. For parameters that
  /// get their values later, from init_parameters() or a checkpoint.
  bool random = true;
};

/// While alive, modules that this thread builds get no memory. deferred_init() uses it.
class DeferredScope {
 public:
  /// Starts recording.
  explicit DeferredScope(DeferredOptions options = {});
  /// Stops recording.
  ~DeferredScope();
  DeferredScope(const DeferredScope&) = delete;
  DeferredScope& operator=(const DeferredScope&) = delete;

 private:
  bool shapes_only_before_;
};

/// Returns build(), recorded instead of run.
template <typename Build>
auto deferred_init(Build&& build, DeferredOptions options = {}) {
  DeferredScope scope(options);
  return std::forward<Build>(build)();
}

}  // namespace fsdp
