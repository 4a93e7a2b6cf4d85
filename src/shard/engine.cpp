#include "shard/engine.h"

#include <algorithm>
#include <utility>

#include "base/format.h"
#include "shard/background.h"
#include "shard/contents.h"
#include "shard/on_disk.h"
#include "shard/saved_activations.h"
#include "shard/tensor_access.h"
#include "shard/tree.h"

namespace fsdp::shard {

Engine::Engine(World world, at::Device device, ShardOptions chosen)
    : options(std::move(chosen)),
      comm(std::move(world), device, options.uneven_use),
      offload(comm, units),
      masters(comm, units),
      reducer(comm, offload, units),
      gatherer(comm, offload, masters, options, units) {
  comm.set_memory_source([this] { return memory(); });
}

// Memory returns to the compute stream, which must first wait for the side streams.
Engine::~Engine() {
  comm.join_streams();
  offload.join_stream();
}

std::pair<Flat*, size_t> Engine::find(const std::string& parameter) {
  std::string close;
  const size_t dot = parameter.rfind('.');
  const std::string last = dot == std::string::npos ? parameter : parameter.substr(dot);
  for (Flat* flat : flats())
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      const auto& names = flat->parameters()[i].names;
      if (std::find(names.begin(), names.end(), parameter) != names.end()) return {flat, i};
      if (close.size() < 200 && names[0].ends_with(last))
        close += (close.empty() ? "\"" : ", \"") + names[0] + "\"";
    }
  throw Error(formatted("the sharded model has no parameter \"{}\".", parameter),
              close.empty() ? "sharded.shards() lists the names."
                            : formatted("did you mean {}?", close));
}

void Engine::use(Unit& unit, const char* by, bool backward) {
  Unit& head = unit.uneven && !unit.pinned ? *unit.parent : unit;  // of its family
  if (!backward) {
    reducer.note_use(unit);
    reducer.note_use(head);
  }
  gatherer.ensure(unit, by, backward);
  if (backward && gatherer.in_backward() && !head.uneven_units.empty() && !unit.pinned &&
      !std::exchange(head.family_used, true))
    reducer.reduce_what_is_done();
}

void Engine::before_write(Unit& unit, const char* by) {
  masters.check_write(unit, by);
  shard::before_change(*this);
  gatherer.reshard(unit);  // what is gathered is older than the masters from now on
  for (const auto& flat : unit.flats) {
    flat->settle();
    flat->bump_versions();
    flat->shard_changed();
  }
}

void Engine::hand_out_masters(HandedOut to) {
  Unseen unseen;
  for (const auto& unit : units)
    if (unit->meta)
      throw Error(unit->label() + " has no values yet.",
                  "call sharded.materialize(device) before creating an optimizer.");
  reducer.forget_cleared();
  reducer.settle_factor();
  masters.hand_out(to);
}

void Engine::begin_backward(const GradientsToCome& coming) {
  gatherer.begin_backward();
  reducer.begin_backward(coming);
}

void Engine::end_backward(bool failed) {
  Unseen unseen;
  reducer.end_backward(failed);
  masters.backward_ended();
  comm.end_step();
  gatherer.end_backward(failed);
}

void Engine::zero_weight_step() {
  if (comm.last_calls().empty() && std::any_of(units.begin(), units.end(), [](const auto& unit) {
        return unit->group->shard_size * unit->group->replicate_size > 1;
      }))
    throw Error(formatted("rank {}: zero_weight_step() repeats the communication of the step "
                          "before, and there was none.",
                          world().rank()),
                "take at least one step with data on every rank first.");
  if (std::any_of(units.begin(), units.end(), [](const auto& unit) { return unit->uneven; }))
    throw Error(formatted("rank {}: zero_weight_step() can't repeat a step of units that only some "
                          "ranks use.",
                          world().rank()),
                "run forward and backward on a sample and scale its loss by 0.");
  begin_backward({});
  try {
    Unseen unseen;
    const auto calls = comm.last_calls();
    gatherer.meet_stale_readers("zero_weight_step");
    for (const CommContext::Call& call : calls) {
      if (call.flat) {
        reducer.repeat(*call.flat);
      } else {
        gatherer.reshard(*call.unit);
        gatherer.issue(*call.unit, "zero_weight_step");
      }
    }
  } catch (...) {
    end_backward(/*failed=*/true);
    throw;
  }
  end_backward(/*failed=*/false);
}

// --- reports ---

namespace {

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : int64_t{0};
}

void add_memory(const Flat& flat, MemoryReport& report) {
  const bool separate = !flat.shard.is_same(flat.master);
  report.parameters += bytes_of(flat.master) + bytes_of(flat.rest);
  if (separate) report.gathered_from += bytes_of(flat.shard);
  if (flat.window.defined()) report.shared_window += bytes_of(flat.shard);
  if (gradient_on_host(flat)) report.host += bytes_of(flat.grad_memory);
  if (shard_on_host(flat)) {
    report.gathered_from += bytes_of(flat.host->resident);
    report.host += bytes_of(flat.shard);
  }
  if (updated_on_host(flat)) {
    report.host += bytes_of(flat.rest);
    if (separate) report.host += bytes_of(flat.master);
    report.parameters -= master_bytes_away(flat);
    report.optimizer += buffer_bytes(flat);
    report.host += buffer_bytes(flat) - master_bytes_away(flat);
  }
  report.gradients += bytes_of(flat.grad_memory);
  report.secondary += bytes_of(flat.secondary);
  int64_t held = 0;
  for (size_t i = 0; i < flat.parameters().size(); ++i)
    held += flat.layout().slice(i, flat.rank()).numel;
  report.padding += (flat.layout().shard_numel() - held) * element_bytes(flat.master_dtype());
}

}  // namespace

MemoryReport Engine::memory() const {
  MemoryReport report;
  for (const Flat* flat : flats()) add_memory(*flat, report);
  gatherer.add_memory(report);
  reducer.add_memory(report);
  report.optimizer += masters.state_bytes();
  report.host += masters.host_state_bytes();
  report.activations = saved_activations::peak();
  report.host_activations = saved_activations::host();
  return report;
}

void Engine::forget_events() {
  comm.forget_events();
  gatherer.forget_events();
  reducer.forget_events();
  offload.forget_events();
}

// --- contents.h, background.h ---

const std::vector<std::shared_ptr<Unit>>& units_of(const Engine& model) {
  return model.units;
}

const ModuleTree* tree_of(const Engine& model) {
  return model.tree.get();
}

const World& world_of(const Engine& model) {
  return model.world();
}

at::Device device_of(const Engine& model) {
  return model.device();
}

MemoryReport memory_of(const Engine& model) {
  return model.memory();
}

at::Tensor gather_shard(Engine& model, Flat& flat, const at::Tensor& shard, const char* what) {
  return model.gatherer.gather_shard(flat, shard, what);
}

void begin_load(Engine& model, const char* why) {
  model.gatherer.reshard_all();
  model.gatherer.synchronize_readers(why);
  before_change(model);
}

void loaded(Engine& model, Unit& unit) {
  model.gatherer.changed(unit);
}

const std::shared_ptr<Background>& background_of(const Engine& engine) {
  return engine.background;
}

void before_change(const Engine& engine) {
  if (engine.background) engine.background->before_change();
}

void set_background(Engine& engine, std::shared_ptr<Background> work) {
  engine.background = std::move(work);
}

}  // namespace fsdp::shard
