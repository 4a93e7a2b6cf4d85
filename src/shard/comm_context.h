// CommContext: what gathers, reductions and copies to the host share. It has the world, the streams
// they run on, and a record of what was sent, when, and how long the computation waited for it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "fsdp/error.h"
#include "fsdp/shard_info.h"
#include "fsdp/world.h"
#include "shard/device_stream.h"

namespace fsdp::shard {

class Flat;
class Profiler;  // profile.h
class Unit;

class CommContext {
 public:
  // `uneven_use`: the user knows that ranks may use different units.
  CommContext(World world, at::Device device, bool uneven_use);
  CommContext(const CommContext&) = delete;
  CommContext& operator=(const CommContext&) = delete;

  const World& world() const { return world_; }
  at::Device device() const { return device_; }
  const SideStream& gather_stream() const { return gather_stream_; }
  const SideStream& reduce_stream() const { return reduce_stream_; }
  const SideStream& replicate_stream() const { return replicate_stream_; }

  void join_streams() const;  // the compute stream waits for all of them

  // Runs a communicator's call and adds its time on the host to the traffic.
  template <typename Call>
  auto run(Call call) {
    struct Clock {
      std::chrono::nanoseconds& total;
      std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
      ~Clock() { total += std::chrono::steady_clock::now() - start; }
    } clock{traffic_.host_time};
    try {
      return call();
    } catch (const Error& error) {
      explain(error);
    }
  }

  // --- writes to shards ---
  void shards_written() { written_.record(device_); }    // by the current stream
  void await_shards() const { written_.wait(device_); }  // the current stream does
  void forget_events() { written_.forget(); }

  // --- what was sent ---
  Traffic& traffic() { return traffic_; }
  Traffic take_traffic();  // with the waits of the compute stream; waits for the device
  void reset_traffic();
  Stalls& stalls() { return stalls_; }

  // --- the collectives of a step, so that a rank without data can repeat them ---
  struct Call {
    Unit* unit;
    Flat* flat;  // null: a gather
  };
  void note_gather(Unit& unit) { calls_.push_back({&unit, nullptr}); }
  void note_reduction(Flat& flat);
  void end_step();                         // its calls are last_calls() from now on
  void forget_calls() { calls_.clear(); }  // of evaluation since the last backward
  const std::vector<Call>& last_calls() const { return last_calls_; }
  void forget_units();  // another model has them now

  // --- observers ---
  Profiler* profiler() const { return profiler_.get(); }  // null: nobody measures
  void set_profiler(std::shared_ptr<Profiler> profiler) { profiler_ = std::move(profiler); }
  // Where the profiler gets the memory in use from.
  void set_memory_source(std::function<MemoryReport()> source) { memory_ = std::move(source); }
  void show_memory() const;  // to the profiler, if there is one
  void record_events(bool on);
  bool records_events() const { return records_events_; }
  const std::vector<Event>& events() const { return events_; }
  void log(Event::Kind kind, const Unit& unit, bool backward, bool ahead = false);

 private:
  // Rethrows, with a hint about units that only some ranks use.
  [[noreturn]] void explain(const Error& error) const;

  const World world_;
  const at::Device device_;
  const bool uneven_use_;
  const SideStream gather_stream_, reduce_stream_, replicate_stream_;
  StreamEvent written_;  // every write to a shard so far
  Traffic traffic_;
  Stalls stalls_;  // of the compute stream, while it waits for gathers and reductions
  std::vector<Call> calls_, last_calls_;
  std::shared_ptr<Profiler> profiler_;
  std::function<MemoryReport()> memory_;
  bool records_events_ = false;
  std::vector<Event> events_;
};

// The compute stream waits for everything that is on the side stream, if the device still works.
void join(const SideStream& side, at::Device device);

}  // namespace fsdp::shard
