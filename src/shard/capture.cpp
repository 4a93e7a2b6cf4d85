#include "shard/capture.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <bit>
#include <set>

#include "base/seams.h"
#include "comm/modules.h"
#include "shard/background.h"
#include "shard/engine.h"
#include "shard/model.h"
#include "shard/registry.h"
#include "shard/thread_state.h"

namespace fsdp::shard {

namespace {

using Backend = c10::intrusive_ptr<c10d::Backend>;

// The backends of all groups of a model, and of the world.
std::vector<Backend> backends_of(Model& model) {
  std::vector<Backend> all;
  std::set<const void*> seen;
  auto add = [&](const Communicator& comm) {
    if (comm && seen.insert(comm.backend().get()).second) all.push_back(comm.backend());
  };
  const Locked engine = model.lock();
  for (const auto& unit : engine->units) {
    add(unit->group->gather);
    add(unit->group->reduce);
    add(unit->group->replicate);
    if (unit->keep_parts > 1 && unit->needs_slot()) add(unit->group->neighbours(unit->keep_parts));
  }
  add(model.world().comm());
  return all;
}

comm::Backend* ours(const Backend& backend) {
  return dynamic_cast<comm::Backend*>(backend.get());
}

void reshard_all(Model& model) {
  const Locked engine = model.lock();
  Unseen unseen;
  engine->gatherer.reshard_all();
}

// Nothing is gathered; side streams follow the current stream from here on. Gathers wait for it;
// reductions always wait for the current stream.
void join_side_streams(Model& model) {
  model.lock()->comm.shards_written();
}

// Host-side state that doesn't hold when a graph is replayed: which copies of parameters are up to
// date, and how many gradients are still expected.
void forget_what_was(Model& model) {
  const Locked engine = model.lock();
  for (Flat* flat : engine->flats()) {
    flat->secondary_valid = false;
    flat->expect_none();
  }
}

void add_hooks(const at::Tensor& parameter, const std::function<void(uint64_t)>& add) {
  add(torch::autograd::impl::hooks(parameter).size());
  const auto* meta = torch::autograd::impl::get_autograd_meta(parameter);
  if (!meta || !meta->cpp_hooks_list_) return;
  for (const auto& hook : *meta->cpp_hooks_list_)
    add(hook ? 2 : 1);  // a removed hook leaves an empty entry
}

class CudaStepGraph : public StepGraph {
 public:
  CudaStepGraph(Model& model, const CudaStepGraph* sibling) : model_(model) {
    const comm::Module* module = comm::require_module("cuda");
    if (!module->make_graph)
      throw Error("this libfsdp_cuda.so has no CUDA graphs: it is older than libfsdp.so.",
                  "build the project again.");
    graph_ = module->make_graph(sibling ? sibling->graph_.get() : nullptr);
  }

  void record(const std::function<void()>& work) override;
  void replay() override;

 private:
  Model& model_;
  std::unique_ptr<comm::DeviceGraph> graph_;
  std::vector<std::pair<Backend, std::vector<comm::CapturedCall>>> calls_;
  Traffic sent_;  // per replay
};

void CudaStepGraph::record(const std::function<void()>& work) {
  const auto models = registry::models();
  for (const auto& model : models) {
    reshard_all(*model);
    forget_what_was(*model);
  }
  Locked engine = model_.lock();
  CommContext& comm = engine->comm;
  const bool measured = std::exchange(comm.stalls().on, false);  // events in a graph have no time
  const Traffic before = comm.traffic();
  engine.unlock();
  auto restore = [&] {
    comm.stalls().on = measured;
    comm.traffic() = before;
  };
  try {
    // begin() waits for the device, so forgetting the events loses nothing.
    for (const auto& model : models) model->lock()->forget_events();
    graph_->begin();
    for (const auto& model : models) join_side_streams(*model);
    {
      InGraph in_graph;
      work();
    }
    graph_->end();
  } catch (...) {
    graph_->abandon();
    for (const auto& model : models) recover(*model);
    engine.lock();
    restore();
    throw;
  }
  for (const auto& model : models) {
    model->lock()->forget_events();
    for (const Backend& backend : backends_of(*model)) {
      auto* known = ours(backend);
      std::vector<comm::CapturedCall> calls = known ? known->take_captured() : decltype(calls)();
      if (!calls.empty()) calls_.emplace_back(backend, std::move(calls));
    }
  }
  engine.lock();
  sent_.all_gather = comm.traffic().all_gather - before.all_gather;
  sent_.reduce_scatter = comm.traffic().reduce_scatter - before.reduce_scatter;
  sent_.all_reduce = comm.traffic().all_reduce - before.all_reduce;
  sent_.all_to_all = comm.traffic().all_to_all - before.all_to_all;
  restore();
}

void CudaStepGraph::replay() {
  graph_->replay();
  for (const auto& [backend, calls] : calls_) ours(backend)->replayed(calls);
  const Locked engine = model_.lock();
  Traffic& traffic = engine->comm.traffic();
  traffic.all_gather += sent_.all_gather;
  traffic.reduce_scatter += sent_.reduce_scatter;
  traffic.all_reduce += sent_.all_reduce;
  traffic.all_to_all += sent_.all_to_all;
}

}  // namespace

std::unique_ptr<StepGraph> make_step_graph(Model& model, const StepGraph* sibling) {
  if (const auto& make = seams().graphs) return make();
  return std::make_unique<CudaStepGraph>(model, static_cast<const CudaStepGraph*>(sibling));
}

bool has_graphs(const Model& model) {
  return seams().graphs || has_streams(model.device());
}

void recover(Model& model) {
  const Locked engine = model.lock();
  engine->forget_events();  // they belong to the failed capture
  engine->end_backward(/*failed=*/true);
  if (!engine->reducer.keeps_gradients()) engine->reducer.zero(/*set_to_none=*/true);
  reshard_all(model);
  engine->forget_events();
  for (const Backend& backend : backends_of(model))
    if (auto* known = ours(backend)) known->take_captured();
}

RecordsStep::RecordsStep(Model& model) : ThreadScope(true) {
  for (const auto& other : registry::models()) {
    const Locked engine = other->lock();
    const bool keep = other.get() != &model && engine->reducer.has_gradients();
    engine->reducer.keep_gradients(keep);
    if (!keep) engine->reducer.zero(/*set_to_none=*/true);
  }
}

RecordsStep::~RecordsStep() {
  for (const auto& other : registry::models()) other->lock()->reducer.keep_gradients(false);
}

bool must_be_eager(Model& model) {
  const Locked engine = model.lock();
  return engine->comm.records_events() || engine->comm.profiler() || engine->offload.in_use() ||
         std::any_of(engine->units.begin(), engine->units.end(),
                     [](const auto& unit) { return unit->pinned || unit->meta || unit->uneven; });
}

uint64_t state_of_recordings(Model& model) {
  uint64_t state = 0;
  auto add = [&](uint64_t part) { state = (state ^ part) * 0x9E3779B97F4A7C15 + (state >> 31); };
  auto add_place = [&](const at::Tensor& tensor) {
    add(tensor.defined() ? reinterpret_cast<uintptr_t>(tensor.unsafeGetTensorImpl()) : 0);
  };
  {
    const Locked engine = model.lock();
    add(engine->changes);
    add(engine->reducer.syncs());
    add(static_cast<uint64_t>(engine->masters.handed_out()));
    add(std::bit_cast<uint64_t>(engine->reducer.divide_factor()));
    for (const auto& unit : engine->units) {
      add(static_cast<uint64_t>(unit->keep_parts));
      for (const auto& flat : unit->flats) {
        for (const at::Tensor* tensor : {&flat->shard, &flat->master, &flat->rest})
          add_place(*tensor);
        for (const Parameter& parameter : flat->parameters()) {
          add(parameter.handle.requires_grad());
          add_hooks(parameter.handle, add);
        }
      }
    }
  }
  for (const auto& other : registry::models()) {
    if (other.get() == &model) continue;  // while its own units are pinned, steps are eager
    const Locked engine = other->lock();
    for (const auto& unit : engine->units)
      if (unit->pinned) add(reinterpret_cast<uintptr_t>(unit.get()));
  }
  return state;
}

void begin_replays(Model& model) {
  {
    const Locked engine = model.lock();
    if (engine->background) engine->background->check();
  }
  model.check_communicators();
  for (const auto& other : registry::models()) reshard_all(*other);
}

void before_replayed_update(Model& model) {
  before_change(*model.lock());
}

void end_replays(Model& model) {
  model.lock()->gatherer.shards_written();
  for (const auto& other : registry::models())
    if (other.get() != &model) join_side_streams(*other);
  at::autocast::clear_cache();  // it holds casts of the old weights
}

bool has_gradients(Model& model) {
  return model.lock()->reducer.has_gradients();
}

}  // namespace fsdp::shard
