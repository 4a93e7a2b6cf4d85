// Profile: where a step's time goes, unit by unit. trace: one step for Perfetto.
//
//   fsdp::Profile profile;
//   for (int i = 0; i < 10; ++i) {
//     profile.begin(sharded);
//     step();                       // forward, backward, update
//     profile.end();
//   }
//   std::cout << profile.describe();
//   fsdp::trace("trace.json", step);
//
// Times of gathers and reductions are the device's, from timed events on the stream they run on; on
// the CPU they are what the computing thread spent in the communicators' calls. They hold the wait
// for ranks that come later. docs/profiling.md reads a table. A step that is replayed as a CUDA
// graph has nothing to see here: take eager ones.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/fully_shard.h"

namespace fsdp {

struct ProfiledCalls {  // over all steps of a profile
  int64_t count = 0;
  double median_ms = 0, max_ms = 0;
  int64_t bytes = 0;  // that this rank sent, as Traffic counts them
};

struct ProfileRow {
  std::string unit;  // "(ranks meet)": shared memory only; around the update, when nobody may read
  bool backward = false;
  ProfiledCalls gathers;
  ProfiledCalls reshards;  // host time; nothing is sent
  ProfiledCalls reductions;
  double exposed_ms = 0;  // that the compute stream (on the CPU, the thread) waited for the above
};

class Profile {
 public:
  Profile();
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  // A step. Both wait for the device. May be repeated, with the same model.
  void begin(const Sharded& sharded);
  void end();

  int64_t steps() const;
  double step_ms() const;        // of one step, on average
  double exposed_share() const;  // of that time; 0 … 1
  // Of units with parameters, in the order of Sharded::units(), forward first.
  std::vector<ProfileRow> rows() const;
  ProfileRow total() const;  // of all rows
  // What engine and autograd held when they held most: when forward was done or backward was.
  // memory().total() + memory().activations is what the device's memory should peak at, beside
  // temporaries, buffers and inputs.
  MemoryReport memory() const;
  std::string describe() const;  // a table; counts, bytes and exposed time of one step

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Calls `step` and writes what LibTorch's profiler saw of it to `path`, as JSON for
// https://ui.perfetto.dev and chrome://tracing: operators, kernels of a GPU, and the gathers,
// reshards and reductions of sharded models by the names of their units. For this rank only.
void trace(const std::string& path, const std::function<void()>& step);

}  // namespace fsdp
