// Profiler: how long the gathers, reshards and reductions of each unit take, and how long
// computation stood still for them.
//
// A model has one only while somebody looks (fsdp::Profile); otherwise what is here costs a branch,
// and another one for whoever records a trace: a Profiled is also a scope in it, "gather layers.3".
//
// On a GPU a timed event stands on either side of the work, on the stream that it runs on, and on
// either side of each wait of the compute stream. On the CPU the time is what the computing thread
// spent in the communicators' calls, and all of it is exposed. Reshards are host time everywhere:
// nothing is sent. What sent nothing (a world of one, parameters read in shared memory) is no
// gather and no reduction. Everything is called under the model's mutex.
#pragma once

#include <ATen/record_function.h>

#include <array>
#include <chrono>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/shard_info.h"
#include "shard/device_stream.h"

namespace fsdp::shard {

class Model;
class Unit;

class Profiler {
 public:
  enum Kind { kGather, kReshard, kReduce };

  struct Calls {
    std::vector<double> ms;  // one a call
    int64_t bytes = 0;       // that this rank sent, as Traffic counts them
  };
  struct Pass {  // of one unit, in forward or in backward
    std::array<Calls, 3> calls;
    double exposed_ms = 0;
  };
  struct Passes {
    Pass forward, backward;
  };

  explicit Profiler(at::Device device) : device_(device) {}

  // Waits for the device; then everything that was done is in passes().
  void settle();
  const std::map<std::string, Passes>& passes() const { return passes_; }

  // Ranks that read each other's memory met around an update: nobody reads while it is written.
  void met(std::chrono::nanoseconds host_time);
  double meetings_ms() const { return meetings_ms_; }

  // What is held now, `activations` included. The most is kept. Called when forward is done, which
  // is when autograd has kept all it will, whenever gradients are given memory, and after backward.
  void see(const MemoryReport& now);
  const MemoryReport& most_memory() const { return most_; }

 private:
  friend class Profiled;
  friend class HostWait;
  friend void exposed_wait(Model& model, const Moment& moment, bool backward);

  using Ends = std::pair<c10::Event, c10::Event>;
  struct Open {  // on its way through the device
    Ends ends;
    std::string unit;
    bool backward;
    std::optional<Kind> kind;  // nothing: a wait of the compute stream
  };
  struct LastGather {
    bool backward;
    size_t index;  // of its time in Calls::ms
  };

  c10::Event mark() const;  // a timed event, here in the current stream
  Pass& pass(const std::string& unit, bool backward);
  void add(const std::string& unit, bool backward, Kind kind, double ms);

  at::Device device_;
  std::map<std::string, Passes> passes_;
  std::vector<Open> open_;
  std::map<const Moment*, std::string> units_;  // who waits for the moment waits for this unit
  std::map<std::string, LastGather> last_gathers_;
  double meetings_ms_ = 0;
  MemoryReport most_;
};

// A part of a trace with a name, where somebody records one.
class TraceScope {
 public:
  TraceScope(const char* what, const Unit& unit);
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  std::string name_;
  std::optional<at::RecordFunction> record_;
};

// One gather, reshard or reduction, from here to done(), both on the stream that it runs on. One
// that is never done (an error) is forgotten.
class Profiled {
 public:
  Profiled(Model& model, Profiler::Kind kind, const Unit& unit, bool backward);
  // `moments` were recorded behind it: exposed_wait knows by them what it waits for.
  void done(std::initializer_list<const Moment*> moments = {});

 private:
  TraceScope scope_;
  Model& model_;
  Profiler* profiler_;
  Profiler::Kind kind_;
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
  HostWait(Model& model, const Unit& unit, bool backward);
  ~HostWait();
  HostWait(const HostWait&) = delete;
  HostWait& operator=(const HostWait&) = delete;

 private:
  TraceScope scope_;
  Model& model_;
  const Unit& unit_;
  bool backward_;
  std::chrono::nanoseconds host_time_;
};

// The current stream, on which is computed, waits for the moment.
void exposed_wait(Model& model, const Moment& moment, bool backward);

}  // namespace fsdp::shard
