// A rank of fsdp explain: shards a toy model, takes three steps, and records the first (when memory
// is allocated) and the third (what the engine does). In the first two the engine learns the order
// of the units.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>

#include "base/format.h"
#include "cli/explain.h"
#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/models.h"
#include "fsdp/optim.h"
#include "fsdp/world.h"
#include "shard/contents.h"
#include "shard/model.h"
#include "shard/unit.h"
#include "train/training.h"

namespace fsdp::cli {
namespace {

using std::chrono::steady_clock;

// --- the toy: small enough to draw. On 2 ranks a block is cut in the middle of its gate ---

constexpr int64_t kDim = 8, kWide = 16;

struct ToyBlockImpl : torch::nn::Module {
  ToyBlockImpl() {
    auto linear = [&](const char* name, int64_t in, int64_t out) {
      return register_module(name,
                             torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
    };
    up = linear("up", kDim, kWide);
    gate = linear("gate", kDim, kWide);
    down = linear("down", kWide, kDim);
  }
  at::Tensor forward(const at::Tensor& x) {  // [samples, kDim], like its result
    return x + down(at::silu(gate(x)) * up(x));
  }
  torch::nn::Linear up = nullptr, gate = nullptr, down = nullptr;
};
TORCH_MODULE(ToyBlock);

struct ToyImpl : torch::nn::Module {
  explicit ToyImpl(int count) {
    auto options = torch::nn::LinearOptions(kDim, kDim).bias(false);
    in = register_module("in", torch::nn::Linear(options));
    register_module("blocks", list);
    for (int i = 0; i < count; ++i) {
      blocks.emplace_back();
      list->push_back(blocks.back());
    }
    out = register_module("out", torch::nn::Linear(options));
  }
  at::Tensor forward(const at::Tensor& x) {  // [samples, kDim], like its result
    at::Tensor y = in(x);
    for (ToyBlock& block : blocks) y = block->forward(y);
    return out(y);
  }
  torch::nn::Linear in = nullptr, out = nullptr;
  torch::nn::ModuleList list;
  std::vector<ToyBlock> blocks;
};
TORCH_MODULE(Toy);

struct Subject {
  std::shared_ptr<torch::nn::Module> module;
  WrapPolicy wrap;
  std::function<at::Tensor()> loss;  // forward on this rank's batch
};

Subject make_subject(const ExplainOptions& options, const World& world) {
  torch::manual_seed(1);  // every rank builds the same model …
  at::Generator random = at::detail::createCPUGenerator(100 + world.rank());  // … and has its data
  if (options.model == "llama-tiny") {
    models::Llama llama(models::LlamaConfig{
        .vocab = 16, .dim = kDim, .layers = options.blocks, .heads = 2, .ffn = kWide});
    at::Tensor ids = at::randint(0, 16, {4, 9}, random, at::TensorOptions().dtype(at::kLong));
    at::Tensor now = ids.narrow(1, 0, 8), next = ids.narrow(1, 1, 8);
    return {llama.ptr(), wrap::modules<models::LlamaBlock>(),
            [llama, now, next]() mutable { return llama->forward(now, next); }};
  }
  Toy toy(options.blocks);
  at::Tensor x = at::randn({4, kDim}, random), y = at::randn({4, kDim}, random);
  return {toy.ptr(), wrap::modules<ToyBlock>(),
          [toy, x, y]() mutable { return at::mse_loss(toy->forward(x), y); }};
}

DeviceMesh mesh_of(ShardingStrategy strategy, const World& world) {
  if (strategy != ShardingStrategy::HYBRID_SHARD) return {};
  return DeviceMesh(world, {{"replicate", 2}, {"shard", world.size() / 2}});
}

// --- the record ---

Json json_of(const MemoryReport& memory) {
  return {{"parameters", memory.parameters}, {"whole_units", memory.unsharded},
          {"gradients", memory.gradients},   {"on_their_way", memory.reduce_buffers},
          {"states", memory.optimizer},      {"total", memory.total()}};
}

// A unit: its buffer, and for each parameter its offset and the part that each rank keeps.
// All parameters of the toys share a dtype, so a unit has one flat buffer.
Json json_of(const shard::Unit& unit) {
  const shard::Flat& flat = *unit.flats.front();
  const shard::Layout& layout = flat.layout();
  auto element = static_cast<int64_t>(c10::elementSize(flat.param_dtype()));
  Json parameters = Json::array();
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    const shard::Parameter& parameter = flat.parameters()[i];
    int64_t row = parameter.sizes.size() > 1 ? layout.numel(i) / parameter.sizes.front() : 1;
    Json kept = Json::array();  // by rank of the shard group
    for (int rank = 0; rank < layout.world(); ++rank) {
      shard::Slice slice = layout.slice(i, rank);
      kept.push_back({{"first", slice.begin}, {"numel", slice.numel}});
    }
    parameters.push_back({{"name", parameter.name()},
                          {"shape", parameter.sizes},
                          {"row", row},
                          {"offset", layout.offset(i)},
                          {"numel", layout.numel(i)},
                          {"kept", kept}});
  }
  return {{"name", unit.name},
          {"numel", unit.numel()},
          {"full_numel", layout.full_numel()},
          {"shard_numel", layout.shard_numel()},
          {"full_bytes", layout.full_numel() * element},
          {"shard_bytes", layout.shard_numel() * element},
          {"has_own_buffer", unit.root || unit.keep_parts == 1},
          {"sends", unit.needs_slot()},
          {"parameters", parameters}};
}

// A unit that needs no gather is opened and closed instead.
const char* event_name(Event::Kind kind, const shard::Unit& unit) {
  constexpr const char* kNames[] = {"gather", "ready", "free", "reduce", "reduced"};
  if (!unit.needs_slot() && kind == Event::kGatherIssued) return "open";
  if (!unit.needs_slot() && kind == Event::kResharded) return "close";
  return kNames[static_cast<int>(kind)];
}

// Bytes that this rank sends for an event. A gather sends its shard to every other rank of the
// shard group; a reduction sends each of them their part, and along "replicate" twice the averaged
// part.
int64_t sent_for(const Event& event, const shard::Unit& unit) {
  const shard::Flat& flat = *unit.flats.front();
  const shard::Group& group = *unit.group;
  if (event.kind == Event::kGatherIssued && unit.needs_slot())
    return flat.gather_message_bytes() * (group.shard_size - 1);
  if (event.kind == Event::kReduceIssued) {
    const int64_t part =
        flat.layout().shard_numel() * static_cast<int64_t>(c10::elementSize(flat.reduce_dtype()));
    return flat.reduce_message_bytes() * (group.shard_size - 1) +
           2 * part * (group.replicate_size - 1) / group.replicate_size;
  }
  return 0;
}

struct Marks {  // when each phase of the step began and ended
  steady_clock::time_point start, forward_end, backward_end, update_end;
};

double microseconds(steady_clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

Json json_of(const std::vector<Event>& events, const Marks& marks, const shard::Engine& model) {
  const auto& units = shard::units_of(model);
  Json all = Json::array();
  for (const Event& event : events) {
    auto unit = std::find_if(units.begin(), units.end(),
                             [&](const auto& candidate) { return candidate->name == event.unit; });
    if (unit == units.end())
      throw Error(formatted("there is an event of unit \"{}\", which doesn't exist.", event.unit),
                  "");
    const char* phase = event.at <= marks.forward_end    ? "forward"
                        : event.at <= marks.backward_end ? "backward"
                                                         : "step";
    all.push_back({{"us", microseconds(event.at - marks.start)},
                   {"phase", phase},
                   {"event", event_name(event.kind, **unit)},
                   {"unit", event.unit},
                   {"ahead", event.kind == Event::kGatherIssued && event.ahead},
                   {"sent", sent_for(event, **unit)}});
  }
  return all;
}

// --- the steps ---

// Takes two steps and returns the rank's memory during the first.
Json memory_of_first_step(const Subject& subject, const Sharded& sharded, Optimizer& optimizer) {
  Json rows = Json::array();
  auto remember = [&](const char* when) {
    Json row = {{"when", when}};
    row.update(json_of(sharded.memory()));
    rows.push_back(row);
  };
  remember("before");
  at::Tensor loss = subject.loss();
  remember("after forward");
  loss.backward();
  remember("after backward");
  optimizer.step();
  remember("after the step");
  optimizer.zero_grad();
  subject.loss().backward();
  optimizer.step();
  optimizer.zero_grad();
  return rows;
}

// Takes the step that is explained.
Json told_step(const Subject& subject, const Sharded& sharded, Optimizer& optimizer) {
  Json held = json_of(sharded.memory());
  sharded.reset_traffic();
  sharded.record_events(true);
  Marks marks;
  marks.start = steady_clock::now();
  at::Tensor loss = subject.loss();
  marks.forward_end = steady_clock::now();
  loss.backward();
  marks.backward_end = steady_clock::now();
  optimizer.step();
  marks.update_end = steady_clock::now();
  Traffic traffic = sharded.traffic();
  Json step = {{"loss", loss.item<double>()},
               {"makes_no_memory", held == json_of(sharded.memory())},
               {"events", json_of(sharded.events(), marks, *shard::lock(sharded))},
               {"forward_us", microseconds(marks.forward_end - marks.start)},
               {"backward_us", microseconds(marks.backward_end - marks.start)},
               {"step_us", microseconds(marks.update_end - marks.start)},
               {"traffic",
                {{"all_gather", traffic.all_gather},
                 {"reduce_scatter", traffic.reduce_scatter},
                 {"all_reduce", traffic.all_reduce}}}};
  sharded.record_events(false);
  return step;
}

}  // namespace

Json account_of_a_step(const ExplainOptions& options) {
  World world = init({.backend = "shm"});
  at::set_num_threads(1);
  Subject subject = make_subject(options, world);
  ShardOptions how;
  how.wrap = subject.wrap;
  how.strategy = train::parse_strategy(options.strategy);
  how.mesh = mesh_of(how.strategy, world);
  how.forward_prefetch = how.backward_prefetch = options.prefetch;
  how.share_host_memory = options.shared;
  Sharded sharded = fully_shard(subject.module, how);
  AdamW optimizer(sharded, {.lr = 1e-2});

  const auto engine = shard::lock(sharded);
  const auto& all = shard::units_of(*engine);
  const shard::Group& group = *all.front()->group;
  int64_t numel = 0;
  Json units = Json::array();
  for (const Unit& unit : sharded.units()) {  // the root first
    numel += unit.numel();
    for (const auto& one : all)
      if (one->name == unit.name()) units.push_back(json_of(*one));
  }
  Json account = {{"rank", world.rank()},
                  {"ranks", world.size()},
                  {"model", options.model},
                  {"strategy", name(how.strategy)},
                  {"mesh", group.text},
                  {"shard_size", group.shard_size},
                  {"replicate_size", group.replicate_size},
                  {"shard_rank", group.shard_rank},
                  {"shared_memory", group.shares_memory && group.shard_size > 1},
                  {"prefetch", options.prefetch},
                  {"ring", options.prefetch > 0 ? 2 + options.prefetch : 1},
                  {"numel", numel},
                  {"units", units}};
  account["first_step"] = memory_of_first_step(subject, sharded, optimizer);
  world.comm().barrier();  // so that the clocks start together
  account.update(told_step(subject, sharded, optimizer));
  world.comm().barrier();
  return account;
}

}  // namespace fsdp::cli
