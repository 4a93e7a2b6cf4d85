// Bytes and times: a rank holds its share, gathered units stay within the ring, traffic follows the
// formulas, and the next unit is gathered while the current one computes.
#include <ATen/ATen.h>
#include <torch/utils.h>

#include <chrono>
#include <map>

#include "fsdp/optim.h"
#include "shard/counting_allocator.h"
#include "shard/engine.h"
#include "shard/model.h"
#include "shard/oracle.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kWidth = 64, kDepth = 8;  // units of 4160 elements
constexpr int64_t kUnit = kWidth * kWidth + kWidth;

using Clock = std::chrono::steady_clock;

ShardOptions options(ShardingStrategy strategy = ShardingStrategy::FULL_SHARD) {
  return {.wrap = wrap::modules<nn::Linear>(),
          .strategy = strategy,
          .device = test_device(),
          .share_host_memory = false};
}

struct Measured {
  explicit Measured(const ShardOptions& options) : model(seeded()) {
    sharded = fully_shard(model, options);
  }

  static Mlp seeded() {
    torch::manual_seed(kSeed);
    return Mlp(kWidth, kDepth);
  }

  void step(Optimizer* optimizer = nullptr) {
    model->forward(at::ones({2, kWidth}, test_device())).square().mean().backward();
    if (optimizer) optimizer->step();
    sharded.zero_grad();
  }

  Mlp model;
  Sharded sharded;
};

// --- memory of a rank ---

TEST(Memory, ParametersAreAnEqualShareWithLittlePadding) {
  Measured subject(options());
  auto report = subject.sharded.memory();
  double whole = 4.0 * kUnit * kDepth;
  EXPECT_EQ(sum_over_ranks(static_cast<double>(report.parameters - report.padding)), whole);
  EXPECT_GE(report.parameters, whole / world_size());
  // Shards are multiples of 64 elements, and AUTO spends 1 % on whole rows at most.
  EXPECT_LE(report.parameters, 1.01 * whole / world_size() + 4 * 64 * kDepth);
}

TEST(Memory, GradientsAndStatesAreAnEqualShareToo) {
  Measured subject(options());
  AdamW optimizer(subject.sharded, {.lr = 1e-3});
  subject.step(&optimizer);
  subject.model->forward(at::ones({2, kWidth}, test_device())).sum().backward();
  auto report = subject.sharded.memory();
  EXPECT_EQ(report.gradients, report.parameters);
  EXPECT_GE(report.optimizer, 2 * (report.parameters - report.padding));
  EXPECT_LE(report.optimizer, 2 * report.parameters + 64 * kDepth);
  EXPECT_EQ(report.accumulated, 0);
}

TEST(Memory, WithNoShardEverybodyHoldsEverything) {
  Measured subject(options(ShardingStrategy::NO_SHARD));
  auto report = subject.sharded.memory();
  EXPECT_EQ(report.parameters - report.padding, 4 * kUnit * kDepth);
}

// The table of docs/sharding.md, in bytes per element of a shard.
TEST(Memory, BytesOfMastersAndShardsAreThoseOfTheDocumentation) {
  struct Row {
    MixedPrecision precision;
    int64_t master, shard;
  };
  const std::vector<Row> rows = {
      {{}, 4, 0},
      {{.param_dtype = at::kBFloat16}, 2, 2},
      {{.param_dtype = at::kBFloat16, .split_master = false}, 4, 2},
      {{.param_dtype = at::kHalf}, 4, 2},
  };
  for (const Row& row : rows) {
    auto shard_options = options();
    shard_options.mixed_precision = row.precision;
    Measured subject(shard_options);
    int64_t elements = 0;
    for (const shard::Flat* flat : shard::lock(subject.sharded)->flats())
      elements += flat->layout().shard_numel();
    MemoryReport before = subject.sharded.memory();
    EXPECT_EQ(before.parameters, row.master * elements);
    EXPECT_EQ(before.gathered_from, row.shard * elements);
    subject.sharded.parameters();  // joins what is split
    MemoryReport after = subject.sharded.memory();
    EXPECT_EQ(after.parameters, 4 * elements);
    EXPECT_EQ(after.gathered_from, row.shard * elements);
  }
}

TEST(Memory, AccumulationWithoutCommunicationKeepsWholeGradients) {
  Measured subject(options());
  {
    auto guard = subject.sharded.no_sync();
    subject.model->forward(at::ones({2, kWidth}, test_device())).sum().backward();
  }
  MemoryReport memory = subject.sharded.memory();
  // With one rank they are written to their final place.
  EXPECT_GE(world_size() == 1 ? memory.gradients : memory.accumulated, 4 * kUnit * kDepth);
}

// --- gathered units ---

TEST(Memory, GatheredUnitsStayWithinTheRing) {
  for (int depth : {0, 1, 2}) {
    SCOPED_TRACE(depth);
    auto shard_options = options();
    shard_options.forward_prefetch = shard_options.backward_prefetch = depth;
    Measured subject(shard_options);
    for (int i = 0; i < 4; ++i) subject.step();
    auto report = subject.sharded.memory();
    int64_t unit = static_cast<int64_t>(1.01 * 4 * kUnit) + 4 * 64 * world_size();
    EXPECT_LE(report.ring, (2 + depth) * unit);
    EXPECT_EQ(report.unsharded, report.ring);  // the root has no parameters, no unit is pinned
    EXPECT_EQ(world_size() > 1, report.ring > 0);
  }
}

TEST(Memory, UnitsShardedBottomUpStayWithinTheRingToo) {
  auto shard_options = options();
  shard_options.wrap = {};
  Mlp model = Measured::seeded();
  for (int64_t i = 0; i < kDepth; ++i) fully_shard(model->layer(i), shard_options);
  auto sharded = fully_shard(model, shard_options);
  for (int i = 0; i < 3; ++i)
    model->forward(at::ones({2, kWidth}, test_device())).square().mean().backward();
  auto report = sharded.memory();
  EXPECT_EQ(report.unsharded, report.ring);  // only the root, which is empty, has its own buffer
  EXPECT_LE(report.ring, 3 * (static_cast<int64_t>(1.01 * 4 * kUnit) + 4 * 64 * world_size()));
}

TEST(Memory, IsTheSameInStep3AndInStep40) {
  for (bool share : {false, true}) {
    for (auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP,
                          ShardingStrategy::NO_SHARD}) {
      SCOPED_TRACE(std::string(name(strategy)) + (share ? " shared" : " gathered"));
      auto shard_options = options(strategy);
      shard_options.share_host_memory = share;
      Measured subject(shard_options);
      AdamW optimizer(subject.sharded, {.lr = 1e-4});
      for (int i = 0; i < 3; ++i) subject.step(&optimizer);
      auto early = subject.sharded.memory();
      for (int i = 3; i < 40; ++i) subject.step(&optimizer);
      auto late = subject.sharded.memory();
      EXPECT_EQ(early.table(), late.table());
      EXPECT_EQ(early.total(), late.total());
      EXPECT_EQ(early.shared_window, late.shared_window);
    }
  }
}

// The report equals what the allocator has handed out. Between steps there is no graph, so only the
// engine's and the optimizer's memory is left.
TEST(Memory, TheAllocatorAgrees) {
  if (!test_device().is_cpu()) GTEST_SKIP() << "counts what the CPU allocator gives out";
  CountingAllocator& allocated = counted();
  size_t before = allocated.live;
  Measured subject(options());
  AdamW optimizer(subject.sharded, {.lr = 1e-4});
  auto live = [&] { return static_cast<int64_t>(allocated.live - before); };
  for (int i = 0; i < 3; ++i) subject.step(&optimizer);
  int64_t third = live();
  for (int i = 3; i < 40; ++i) subject.step(&optimizer);
  EXPECT_EQ(live(), third);
  auto report = subject.sharded.memory();
  // Buffers that other ranks read are shared memory, which this allocator does not see.
  int64_t expected = report.total();
  if (test_world().backend() == "shm" && world_size() > 1) expected -= report.reduce_buffers;
  EXPECT_GE(live(), expected);
  EXPECT_LE(live(), expected + 16384);  // small tensors of the model and the tests
}

// At once if the module is destroyed before the handle; otherwise with the next model at the
// latest, because the parameters may be used without the handle.
TEST(Memory, OfAModelThatIsGoneIsGivenBack) {
  if (!test_device().is_cpu()) GTEST_SKIP() << "counts what the CPU's allocator hands out";
  auto another = [] { Measured subject(options()); };
  auto live = [] { return static_cast<int64_t>(counted().live); };
  another();
  another();  // one-time allocations are done
  Sharded handle;
  const int64_t before = live();
  {
    Measured subject(options());
    AdamW optimizer(subject.sharded);
    subject.step(&optimizer);
    handle = subject.sharded;
    EXPECT_GT(live(), before);
  }
  handle = {};
  EXPECT_LE(live(), before);
  {
    Measured subject(options());
    AdamW optimizer(subject.sharded);
    subject.step(&optimizer);
    subject.sharded = {};
  }
  another();
  EXPECT_LE(live(), before);
}

TEST(Memory, TheTableNamesEveryKind) {
  Measured subject(options());
  subject.step();
  std::string table = subject.sharded.memory().table();
  for (const char* word : {"master", "gradient", "gathered", "optimizer", "total"})
    EXPECT_TRUE(contains(table, word)) << table;
}

TEST(Memory, AnOperatorThatNeedsMoreUnitsThanTheRingHasGrowsItAndSaysSo) {
  if (world_size() == 1) GTEST_SKIP() << "nothing is gathered";
  Measured subject(options());
  std::vector<at::Tensor> weights;
  for (int64_t i = 0; i < kDepth; ++i) weights.push_back(subject.model->layer(i)->weight);
  ::testing::internal::CaptureStderr();
  auto sum = at::stack(weights).sum();
  std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(on_any_rank(contains(said, "buffer"))) << said;
  EXPECT_GE(subject.sharded.memory().ring, kDepth * 4 * kUnit);
}

// --- traffic ---

TEST(Traffic, FollowsTheFormulas) {
  int64_t ranks = world_size();
  for (auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP,
                        ShardingStrategy::NO_SHARD}) {
    SCOPED_TRACE(name(strategy));
    Measured subject(options(strategy));
    AdamW optimizer(subject.sharded, {.lr = 1e-4});
    for (int i = 0; i < 2; ++i) subject.step(&optimizer);
    subject.sharded.reset_traffic();
    subject.step(&optimizer);
    auto sent = subject.sharded.traffic();
    int64_t shards = subject.sharded.memory().parameters;  // padding included
    if (strategy == ShardingStrategy::NO_SHARD) {
      EXPECT_EQ(sent.all_reduce, 2 * shards * (ranks - 1) / ranks);
      EXPECT_EQ(sent.all_gather + sent.reduce_scatter, 0);
      continue;
    }
    EXPECT_EQ(sent.reduce_scatter, shards * (ranks - 1));
    EXPECT_EQ(sent.all_reduce, 0);
    if (strategy == ShardingStrategy::SHARD_GRAD_OP) {
      EXPECT_EQ(sent.all_gather, shards * (ranks - 1));
      continue;
    }
    // Every unit once in forward; in backward those that have left the ring of 3. Backward doesn't
    // read the first layer's weight.
    int64_t unit = shards / kDepth * (ranks - 1);
    EXPECT_GE(sent.all_gather, unit * (kDepth + kDepth - 1 - 3));
    EXPECT_LE(sent.all_gather, unit * 2 * kDepth);
  }
}

// --- overlap ---

// For each unit, when the gather that made it ready was issued, in forward or in backward.
std::map<std::string, Clock::time_point> gathers_of(const std::vector<Event>& events,
                                                    bool backward) {
  std::map<std::string, Clock::time_point> issued, gathers;
  for (const auto& event : events) {
    if (event.kind == Event::kGatherIssued) issued[event.unit] = event.at;
    if (event.kind == Event::kReady && event.backward == backward && issued.count(event.unit))
      gathers[event.unit] = issued[event.unit];
  }
  return gathers;
}

TEST(Overlap, TheNextUnitIsOnItsWayBeforeThisOneHasComputed) {
  if (world_size() == 1) GTEST_SKIP() << "nothing is gathered";
  Measured subject(options());
  for (int i = 0; i < 3; ++i) subject.step();
  subject.sharded.record_events(true);
  std::map<int64_t, Clock::time_point> forward_done, backward_done;  // of each layer
  auto x = at::ones({2, kWidth}, test_device());
  for (int64_t i = 0; i < kDepth; ++i) {
    x = subject.model->layer(i)->forward(x);
    forward_done[i] = Clock::now();
    // The gradient of layer i's output arrives when the backward of layer i + 1 is done.
    x.register_hook(
        [&backward_done, i](const at::Tensor&) { backward_done[i + 1] = Clock::now(); });
    x = x.tanh();
  }
  x.square().mean().backward();
  auto events = subject.sharded.events();
  subject.sharded.record_events(false);

  auto unit = [](int64_t i) { return "layers." + std::to_string(i); };
  auto forward = gathers_of(events, false);
  for (int64_t i = 0; i + 1 < kDepth; ++i) {
    ASSERT_TRUE(forward.count(unit(i + 1))) << unit(i + 1);
    EXPECT_LT(forward[unit(i + 1)], forward_done[i]) << unit(i + 1);
  }
  auto backward = gathers_of(events, true);
  int gathered = 0;
  for (int64_t i = kDepth - 1; i > 1; --i) {
    if (!backward.count(unit(i - 1))) continue;  // still gathered from forward
    EXPECT_LT(backward[unit(i - 1)], backward_done[i]) << unit(i - 1);
    ++gathered;
  }
  EXPECT_GE(gathered, 3);
}

TEST(Overlap, WithoutPrefetchAUnitIsGatheredWhenItIsTouched) {
  if (world_size() == 1) GTEST_SKIP() << "nothing is gathered";
  auto shard_options = options();
  shard_options.forward_prefetch = shard_options.backward_prefetch = 0;
  Measured subject(shard_options);
  for (int i = 0; i < 3; ++i) subject.step();
  subject.sharded.record_events(true);
  subject.step();
  std::string last;
  for (const auto& event : subject.sharded.events()) {
    if (event.kind == Event::kGatherIssued) last = event.unit;
    if (event.kind == Event::kReady) {
      EXPECT_EQ(event.unit, last);
    }
  }
  EXPECT_FALSE(last.empty());
}

TEST(Overlap, GradientsAreReducedWhileBackwardGoesOn) {
  Measured subject(options());
  for (int i = 0; i < 2; ++i) subject.step();
  subject.sharded.record_events(true);
  subject.step();
  std::vector<std::string> reduced;
  for (const auto& event : subject.sharded.events())
    if (event.kind == Event::kReduceIssued) reduced.push_back(event.unit);
  ASSERT_EQ(reduced.size(), static_cast<size_t>(kDepth));
  for (int64_t i = 0; i < kDepth; ++i)
    EXPECT_EQ(reduced[i], "layers." + std::to_string(kDepth - 1 - i));
}

}  // namespace
}  // namespace fsdp::testing
