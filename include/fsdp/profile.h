/// @file
/// Where a step's time goes, unit by unit, and a trace of one step for Perfetto.
///
///     fsdp::Profile profile;
///     for (int i = 0; i < 10; ++i) {
///       profile.begin(sharded);
///       step();                       // forward, backward, update
///       profile.end();
///     }
///     std::cout << profile.describe();
///     fsdp::trace("trace.json", step);
///
/// Times of gathers and reductions come from timed events on the stream that runs them; on the CPU
/// they are what the computing thread spends in the communicators' calls. They include waiting for
/// ranks that come later. Profile eager steps: a replayed CUDA graph shows nothing here.
/// docs/profiling.md explains the table.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/fully_shard.h"

namespace fsdp {

/// Calls of one kind, over all steps of a profile.
struct ProfiledCalls {
  int64_t count = 0;     ///< Number of calls.
  double median_ms = 0;  ///< Median time of a call.
  double max_ms = 0;     ///< Longest time of a call.
  int64_t bytes = 0;     ///< Bytes that this rank sent, as Traffic counts them.
};

/// One unit, in forward or in backward.
struct ProfileRow {
  std::string unit;        ///< Its name. "(ranks meet)": the barriers around an update (shm only).
  bool backward = false;   ///< Which pass.
  ProfiledCalls gathers;   ///< All-gathers.
  ProfiledCalls reshards;  ///< Host time; nothing is sent.
  ProfiledCalls reductions;  ///< Reductions of gradients.
  double exposed_ms = 0;     ///< Time that compute (on the CPU, the thread) waited for the above.
};

/// Where the time of a few steps goes.
class Profile {
 public:
  /// Without steps.
  Profile();
  /// Stops a step that hasn't ended.
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  /// Starts a step. All steps must be of one model. Waits for the device.
  void begin(const Sharded& sharded);
  /// Ends the step. Waits for the device.
  void end();

  int64_t steps() const;         ///< Number of steps.
  double step_ms() const;        ///< Average time of a step.
  double exposed_share() const;  ///< Exposed communication as a fraction of that time.

  /// Units with parameters, in the order of Sharded::units(), forward before backward.
  std::vector<ProfileRow> rows() const;
  /// The sum of all rows.
  ProfileRow total() const;
  /// What the engine and autograd held at their peak: at the end of forward or of backward. The
  /// device's peak should be memory().total() + memory().activations, plus temporaries, buffers and
  /// inputs.
  MemoryReport memory() const;
  /// A table as text. Counts, bytes and exposed time are per step.
  std::string describe() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Calls `step` and writes what LibTorch's profiler saw to `path`, as JSON for
/// https://ui.perfetto.dev and chrome://tracing: operators, GPU kernels, and each unit's gathers,
/// reshards and reductions. Covers this rank only.
void trace(const std::string& path, const std::function<void()>& step);

}  // namespace fsdp
