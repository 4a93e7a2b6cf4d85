#include "shard/comm_context.h"

#include <utility>

#include "base/exit_code.h"
#include "shard/profile.h"
#include "shard/saved_activations.h"
#include "shard/unit.h"

namespace fsdp::shard {

void join(const SideStream& side, at::Device device) {
  try {
    StreamEvent done;
    {
      OnStream on(side);
      done.record(device);
    }
    done.wait(device);
  } catch (const std::exception&) {  // the device is lost
  }
}

CommContext::CommContext(World world, at::Device device, bool uneven_use)
    : world_(std::move(world)),
      device_(device),
      uneven_use_(uneven_use),
      gather_stream_(device),
      reduce_stream_(device),
      replicate_stream_(device) {}

void CommContext::join_streams() const {
  for (const SideStream* side : {&gather_stream_, &reduce_stream_, &replicate_stream_})
    join(*side, device_);
}

void CommContext::explain(const Error& error) const {
  const auto says = [&](const char* words) {
    return error.message().find(words) != std::string::npos;
  };
  const bool disagree = says("different calls") || says("no answer in") || says(" left (");
  if (!disagree || uneven_use_) throw;
  throw CodedError(exit_code(error), error.message(),
                   error.hint() +
                       " If ranks use different units in a step (experts, stochastic "
                       "depth), set ShardOptions::uneven_use.");
}

// --- what was sent ---

Traffic CommContext::take_traffic() {
  traffic_.exposed += stalls_.take();
  Traffic traffic = traffic_;
  if (!has_streams(device_)) traffic.exposed = traffic.host_time;
  return traffic;
}

void CommContext::reset_traffic() {
  stalls_.take();
  traffic_ = {};
}

void CommContext::note_reduction(Flat& flat) {
  calls_.push_back({&flat.unit(), &flat});
}

void CommContext::end_step() {
  if (!calls_.empty()) last_calls_ = std::exchange(calls_, {});
}

void CommContext::forget_units() {
  calls_.clear();
  last_calls_.clear();
}

// --- observers ---

void CommContext::show_memory() const {
  if (!profiler_) return;
  MemoryReport now = memory_();
  now.activations = saved_activations::held();
  profiler_->see(now);
}

void CommContext::record_events(bool on) {
  records_events_ = on;
  events_.clear();
}

void CommContext::log(Event::Kind kind, const Unit& unit, bool backward, bool ahead) {
  if (records_events_)
    events_.push_back({kind, unit.name, backward, ahead, std::chrono::steady_clock::now()});
}

}  // namespace fsdp::shard
