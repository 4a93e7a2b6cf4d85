#include "shard/profile.h"

#include "shard/engine.h"
#include "shard/flat.h"
#include "shard/tensor_access.h"
#include "shard/unit.h"

namespace fsdp::shard {
namespace {

using Milliseconds = std::chrono::duration<double, std::milli>;

const char* name(Profiler::Work kind) {
  switch (kind) {
    case Profiler::kGather:
      return "gather ";
    case Profiler::kReshard:
      return "reshard ";
    case Profiler::kReduce:
      return "reduce ";
  }
  return "";
}

int64_t sent(const Traffic& traffic) {
  return traffic.all_gather + traffic.reduce_scatter + traffic.all_reduce + traffic.all_to_all;
}

}  // namespace

// --- Profiler ---

c10::Event Profiler::mark() const {
  c10::Event event(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  event.record(current_stream(device_));
  return event;
}

Profiler::Pass& Profiler::pass(const std::string& unit, bool backward) {
  Passes& both = passes_[unit];
  return backward ? both.backward : both.forward;
}

void Profiler::add(const std::string& unit, bool backward, Work kind, double ms) {
  pass(unit, backward).calls[kind].ms.push_back(ms);
}

void Profiler::settle() {
  for (Open& work : open_) {
    auto& [begin, end] = work.ends;
    end.synchronize();
    double ms = begin.elapsedTime(end);
    if (work.kind)
      add(work.unit, work.backward, *work.kind, ms);
    else
      pass(work.unit, work.backward).exposed_ms += ms;
  }
  open_.clear();
  units_.clear();  // an address may be reused by another event
  last_gathers_.clear();
}

void Profiler::met(std::chrono::nanoseconds host_time) {
  meetings_ms_ += Milliseconds(host_time).count();
}

void Profiler::see(const MemoryReport& now) {
  auto on_device = [](const MemoryReport& report) {
    return report.total() - report.host + report.activations;
  };
  if (on_device(now) > on_device(most_)) most_ = now;
}

bool start_profile(Engine& model, std::shared_ptr<Profiler> profiler) {
  if (model.comm.profiler()) return false;
  model.comm.set_profiler(std::move(profiler));
  return true;
}

void stop_profile(Engine& model, const Profiler& profiler) {
  if (model.comm.profiler() == &profiler) model.comm.set_profiler(nullptr);
}

// --- TraceScope ---

TraceScope::TraceScope(const char* what, const Unit& unit) {
  auto listeners = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!listeners) return;
  name_ = what + unit.name;
  record_.emplace(std::move(*listeners));
  record_->before(name_);
}

// --- Profiled ---

Profiled::Profiled(CommContext& comm, Profiler::Work kind, const Unit& unit, bool backward)
    : scope_(name(kind), unit),
      comm_(comm),
      profiler_(comm.profiler()),
      kind_(kind),
      unit_(unit),
      backward_(backward) {
  if (!profiler_) return;
  bytes_ = sent(comm.traffic());
  host_time_ = comm.traffic().host_time;
  start_ = std::chrono::steady_clock::now();
  if (kind != Profiler::kReshard && has_streams(comm.device())) begin_ = profiler_->mark();
}

void Profiled::done(std::initializer_list<const StreamEvent*> events) {
  if (!profiler_) return;
  if (kind_ == Profiler::kReshard) {
    Milliseconds took = std::chrono::steady_clock::now() - start_;
    return profiler_->add(unit_.name, backward_, kind_, took.count());
  }
  int64_t bytes = sent(comm_.traffic()) - bytes_;
  if (bytes <= 0) return;
  Profiler::Pass& pass = profiler_->pass(unit_.name, backward_);
  Profiler::Calls& calls = pass.calls[kind_];
  calls.bytes += bytes;
  for (const StreamEvent* event : events) profiler_->units_[event] = unit_.name;
  if (begin_) {
    profiler_->open_.push_back(
        {{std::move(*begin_), profiler_->mark()}, unit_.name, backward_, kind_});
    return;
  }
  Milliseconds took = comm_.traffic().host_time - host_time_;
  if (kind_ == Profiler::kGather)
    profiler_->last_gathers_[unit_.name] = {backward_, calls.ms.size()};
  calls.ms.push_back(took.count());
  pass.exposed_ms += took.count();
}

// --- waits ---

HostWait::HostWait(CommContext& comm, const Unit& unit, bool backward)
    : scope_("wait for ", unit),
      comm_(comm),
      unit_(unit),
      backward_(backward),
      host_time_(comm.traffic().host_time) {}

HostWait::~HostWait() {
  Profiler* profiler = comm_.profiler();
  if (!profiler || has_streams(comm_.device())) return;
  double ms = Milliseconds(comm_.traffic().host_time - host_time_).count();
  profiler->pass(unit_.name, backward_).exposed_ms += ms;
  auto gather = profiler->last_gathers_.find(unit_.name);
  if (gather == profiler->last_gathers_.end()) return;
  auto [backward, index] = gather->second;
  profiler->pass(unit_.name, backward).calls[Profiler::kGather].ms[index] += ms;
  profiler->last_gathers_.erase(gather);
}

const std::string* unit_of_parameter(const at::Tensor& tensor) {
  const StorageTag* tag = tag_of(tensor);
  if (!tag || tag->kind != StorageTag::kParameters) return nullptr;
  return &static_cast<const Flat*>(tag->owner)->unit().name;
}

void exposed_wait(CommContext& comm, const StreamEvent& event, bool backward) {
  Profiler* profiler = comm.profiler();
  if (!profiler || !event.recorded()) return comm.stalls().wait(event, comm.device());
  auto known = profiler->units_.find(&event);
  if (known == profiler->units_.end()) return comm.stalls().wait(event, comm.device());
  c10::Event begin = profiler->mark();
  comm.stalls().wait(event, comm.device());
  profiler->open_.push_back(
      {{std::move(begin), profiler->mark()}, known->second, backward, std::nullopt});
}

}  // namespace fsdp::shard
