// Profiler: how long the gathers, reshards and reductions of each unit take, and how long the
// computation waited for them.
//
// A model has a profiler only while it is profiled (fsdp::Profile); otherwise this costs one
// branch, plus one for traces: each Profiled is also a scope of a trace, "gather layers.3".
//
// On a GPU timed events are recorded before and after the work, on its stream, and before and after
// each wait of the compute stream. On the CPU the time is what the computing thread spent in the
// communicators' calls, and all of it is exposed. Reshards are always host time, since nothing is
// sent. Gathers and reductions that send nothing (a world of one, parameters in shared memory)
// aren't counted. All calls hold the model's lock.
#pragma once

#include <ATen/record_function.h>

#include <array>
#include <chrono>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/shard_info.h"
#include "shard/device_stream.h"

namespace fsdp::shard {

class CommContext;
struct Engine;
class Unit;

class Profiler {
 public:
  enum Work { kGather, kReshard, kReduce };

  struct Calls {
    std::vector<double> ms;  // one per call
    int64_t bytes = 0;       // sent by this rank, as Traffic counts them
  };
  struct Pass {  // of one unit, in forward or in backward
    std::array<Calls, 3> calls;
    double exposed_ms = 0;
  };
  struct Passes {
    Pass forward, backward;
  };

  explicit Profiler(at::Device device) : device_(device) {}

  // Waits for the device; passes() is complete afterwards.
  void settle();
  const std::map<std::string, Passes>& passes() const { return passes_; }

  // Adds host time spent in the barriers around an update, where ranks share memory.
  void met(std::chrono::nanoseconds host_time);
  double meetings_ms() const { return meetings_ms_; }

  // Takes the current memory, `activations` included, and keeps the maximum. Called after forward,
  // when autograd has saved everything, whenever gradients get memory, and after backward.
  void see(const MemoryReport& now);
  const MemoryReport& most_memory() const { return most_; }

 private:
  friend class Profiled;
  friend class HostWait;
  friend void exposed_wait(CommContext& comm, const StreamEvent& event, bool backward);

  using Ends = std::pair<c10::Event, c10::Event>;
  struct Open {  // work the device may not have finished
    Ends ends;
    std::string unit;
    bool backward;
    std::optional<Work> kind;  // nullopt: a wait of the compute stream
  };
  struct LastGather {
    bool backward;
    size_t index;  // of its time in Calls::ms
  };

  c10::Event mark() const;  // a timed event, here in the current stream
  Pass& pass(const std::string& unit, bool backward);
  void add(const std::string& unit, bool backward, Work kind, double ms);

  at::Device device_;
  std::map<std::string, Passes> passes_;
  std::vector<Open> open_;
  std::map<const StreamEvent*, std::string> units_;  // the unit that a wait for the event is for
  std::map<std::string, LastGather> last_gathers_;
  double meetings_ms_ = 0;
  MemoryReport most_;
};

// Makes it the model's profiler. False: it has one already.
bool start_profile(Engine& model, std::shared_ptr<Profiler> profiler);
void stop_profile(Engine& model, const Profiler& profiler);

// A named scope of a trace, if one is recorded.
class TraceScope {
 public:
  TraceScope(const char* what, const Unit& unit);
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  std::string name_;
  std::optional<at::RecordFunction> record_;
};

// One gather, reshard or reduction, from construction to done(), both on the stream it runs on. It
// isn't counted if done() is never called (an error).
class Profiled {
 public:
  Profiled(CommContext& comm, Profiler::Work kind, const Unit& unit, bool backward);
  // `events` were recorded right after it; they tell exposed_wait which unit it waits for.
  void done(std::initializer_list<const StreamEvent*> events = {});

 private:
  TraceScope scope_;
  CommContext& comm_;
  Profiler* profiler_;
  Profiler::Work kind_;
  const Unit& unit_;
  bool backward_;
  int64_t bytes_ = 0;  // before
  std::chrono::nanoseconds host_time_{0};
  std::chrono::steady_clock::time_point start_;
  std::optional<c10::Event> begin_;
};

// While alive, the computing thread waits for the gather of a unit (the CPU only).
class HostWait {
 public:
  HostWait(CommContext& comm, const Unit& unit, bool backward);
  ~HostWait();
  HostWait(const HostWait&) = delete;
  HostWait& operator=(const HostWait&) = delete;

 private:
  TraceScope scope_;
  CommContext& comm_;
  const Unit& unit_;
  bool backward_;
  std::chrono::nanoseconds host_time_;
};

// The name of the unit whose parameter, gathered or not, `tensor` is a view of; null: none.
const std::string* unit_of_parameter(const at::Tensor& tensor);

// The current stream, which must be the compute stream, waits for the event.
void exposed_wait(CommContext& comm, const StreamEvent& event, bool backward);

}  // namespace fsdp::shard
