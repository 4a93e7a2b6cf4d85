// fsdp::Profile and fsdp::trace on real ranks. Counts are compared with the engine's events, bytes
// with its traffic and the sizes of units; times only with each other.
#include "fsdp/profile.h"

#include <ATen/ATen.h>
#include <torch/utils.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "fsdp/optim.h"
#include "shard/engine.h"
#include "shard/model.h"
#include "shard/oracle.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kWidth = 64, kDepth = 4;
constexpr int kSteps = 3;

ShardOptions options(ShardingStrategy strategy = ShardingStrategy::FULL_SHARD) {
  return {.wrap = wrap::modules<nn::Linear>(),
          .strategy = strategy,
          .device = test_device(),
          .share_host_memory = false};
}

struct Subject {
  explicit Subject(const ShardOptions& options) : model(seeded()) {
    sharded = fully_shard(model, options);
    optimizer = std::make_unique<AdamW>(sharded, AdamWOptions{.lr = 1e-3});
    for (int i = 0; i < 2; ++i) step();  // after these the order of units is known
  }

  static Mlp seeded() {
    torch::manual_seed(kSeed);
    return Mlp(kWidth, kDepth);
  }

  void step() {
    model->forward(at::ones({2, kWidth}, test_device())).square().mean().backward();
    optimizer->step();
    optimizer->zero_grad();
  }

  void profile_steps(Profile& profile) {
    sharded.reset_traffic();
    sharded.record_events(true);
    for (int i = 0; i < kSteps; ++i) {
      profile.begin(sharded);
      step();
      profile.end();
    }
    traffic = sharded.traffic();
    events = sharded.events();
    sharded.record_events(false);
  }

  int64_t events_of(Event::Kind kind, const std::string& unit, bool backward) const {
    return std::count_if(events.begin(), events.end(), [&](const Event& event) {
      return event.kind == kind && event.unit == unit && event.backward == backward;
    });
  }

  std::vector<Unit> units() const {  // the root has no parameters of its own
    auto all = sharded.units();
    std::erase_if(all, [](const Unit& unit) { return unit.numel() == 0; });
    return all;
  }

  // This rank's part of a unit, in bytes: its masters are float32.
  int64_t shard_bytes(const std::string& name) const {
    for (const auto& unit : shard::lock(sharded)->units)
      if (unit->name == name) return 4 * unit->flats.front()->layout().shard_numel();
    return 0;
  }

  Mlp model;
  Sharded sharded;
  std::unique_ptr<AdamW> optimizer;
  Traffic traffic;
  std::vector<Event> events;
};

void expect_plausible(const ProfiledCalls& calls) {
  EXPECT_GE(calls.median_ms, 0);
  EXPECT_GE(calls.max_ms, calls.median_ms);
  if (calls.count == 0) {
    EXPECT_EQ(calls.max_ms, 0);
    EXPECT_EQ(calls.bytes, 0);
  }
}

TEST(Profiles, CountsAreThoseOfTheEventsAndBytesThoseOfTheUnits) {
  Subject subject(options());
  Profile profile;
  subject.profile_steps(profile);
  EXPECT_EQ(profile.steps(), kSteps);
  EXPECT_GT(profile.step_ms(), 0);
  auto rows = profile.rows();
  auto units = subject.units();
  ASSERT_EQ(rows.size(), 2 * units.size());
  int others = world_size() - 1;
  int64_t gathered = 0, reduced = 0, gathers = 0, reshards = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const ProfileRow& row = rows[i];
    SCOPED_TRACE(row.unit + (row.backward ? " backward" : " forward"));
    EXPECT_EQ(row.unit, units[i / 2].name());
    EXPECT_EQ(row.backward, i % 2 == 1);
    bool sends = others > 0;
    EXPECT_EQ(row.gathers.count,
              sends ? subject.events_of(Event::kGatherIssued, row.unit, row.backward) : 0);
    EXPECT_EQ(row.reshards.count, subject.events_of(Event::kResharded, row.unit, row.backward));
    EXPECT_EQ(row.reductions.count,
              sends ? subject.events_of(Event::kReduced, row.unit, row.backward) : 0);
    int64_t part = subject.shard_bytes(row.unit) * others;
    EXPECT_EQ(row.gathers.bytes, row.gathers.count * part);
    EXPECT_EQ(row.reductions.bytes, row.reductions.count * part);
    EXPECT_EQ(row.reshards.bytes, 0);
    for (const auto& calls : {row.gathers, row.reshards, row.reductions}) expect_plausible(calls);
    gathered += row.gathers.bytes;
    reduced += row.reductions.bytes;
    gathers += row.gathers.count;
    reshards += row.reshards.count;
  }
  EXPECT_EQ(gathered, subject.traffic.all_gather);
  EXPECT_EQ(reduced, subject.traffic.reduce_scatter);
  EXPECT_GT(reshards, 0);
  EXPECT_EQ(gathers > 0, others > 0);
  ProfileRow total = profile.total();
  EXPECT_EQ(total.gathers.count, gathers);
  EXPECT_EQ(total.reshards.count, reshards);
  EXPECT_EQ(total.gathers.bytes, gathered);
  EXPECT_EQ(total.reductions.bytes, reduced);
  EXPECT_EQ(total.reductions.count, others > 0 ? kSteps * kDepth : 0);
}

TEST(Profiles, OnTheCpuEverythingTheCommunicatorsTookIsExposed) {
  if (!test_device().is_cpu()) GTEST_SKIP() << "a GPU computes meanwhile";
  for (bool shared : {false, true}) {
    ShardOptions shard_options = options();
    shard_options.share_host_memory = shared;
    Subject subject(shard_options);
    Profile profile;
    subject.profile_steps(profile);
    ProfileRow total = profile.total();
    double host_ms = std::chrono::duration<double, std::milli>(subject.traffic.host_time).count();
    EXPECT_NEAR(total.exposed_ms, host_ms, 1e-6 * host_ms);
    double sum = 0;
    for (const auto& row : profile.rows()) sum += row.exposed_ms;
    EXPECT_NEAR(sum, total.exposed_ms, 1e-9 * sum);
    EXPECT_NEAR(profile.exposed_share(), host_ms / (profile.step_ms() * kSteps), 1e-6);
    if (shared && test_world().backend() == "shm") {
      EXPECT_EQ(total.gathers.count, 0) << "parameters are read in place";
    }
  }
}

TEST(Profiles, WithoutShardsGradientsAreOnlyReduced) {
  Subject subject(options(ShardingStrategy::NO_SHARD));
  Profile profile;
  subject.profile_steps(profile);
  ProfileRow total = profile.total();
  EXPECT_EQ(total.gathers.count, 0);
  EXPECT_EQ(total.reductions.bytes, subject.traffic.all_reduce);
  EXPECT_EQ(total.reductions.count, world_size() > 1 ? kSteps * kDepth : 0);
}

TEST(Profiles, WhatHappensOutsideOfAStepIsNotInIt) {
  Subject subject(options());
  Profile profile;
  profile.begin(subject.sharded);
  profile.end();
  subject.step();
  EXPECT_EQ(profile.total().reshards.count, 0);
  EXPECT_EQ(profile.total().exposed_ms, 0);
  EXPECT_EQ(profile.steps(), 1);
}

TEST(Profiles, AProfileThatIsDroppedInAStepLeavesTheModelAsItWas) {
  Subject subject(options());
  {
    Profile profile;
    profile.begin(subject.sharded);
    subject.model->forward(at::ones({2, kWidth}, test_device()));
  }
  subject.step();
  Profile other;
  subject.profile_steps(other);
  EXPECT_EQ(other.steps(), kSteps);
}

TEST(Profiles, MisuseIsAnError) {
  Subject subject(options()), another(options(ShardingStrategy::NO_SHARD));
  Profile profile, second;
  expect_error([&] { profile.end(); }, {"end", "begin"});
  profile.begin(subject.sharded);
  expect_error([&] { profile.begin(subject.sharded); }, {"begin", "twice"});
  expect_error([&] { second.begin(subject.sharded); }, {"another Profile is measuring"});
  profile.end();
}

TEST(Profiles, MemoryIsThatOfTheEngineAndOfAutograd) {
  Subject subject(options());
  Profile profile;
  subject.profile_steps(profile);
  MemoryReport memory = profile.memory(), now = subject.sharded.memory();
  EXPECT_EQ(memory.parameters, now.parameters);
  EXPECT_EQ(memory.optimizer, now.optimizer);
  EXPECT_EQ(memory.unsharded, now.unsharded);
  EXPECT_GT(memory.total() + memory.activations, now.parameters + now.optimizer);
  // On the CPU gradients keep their memory, so the peak is at the end of forward, with everything
  // that the layers saved: their inputs and the results of their activations.
  if (test_device().is_cpu()) {
    EXPECT_EQ(memory.gradients, now.gradients);
    EXPECT_GE(memory.activations, 4 * 2 * kWidth * kDepth);
    EXPECT_LE(memory.activations, 3 * 4 * 2 * kWidth * kDepth);
  }
}

TEST(Profiles, TheTableHasTheRowsThatSaySomething) {
  Subject subject(options());
  Profile profile;
  subject.profile_steps(profile);
  std::istringstream text(profile.describe());
  std::string line;
  std::map<std::string, int> rows;
  std::set<size_t> widths;
  while (std::getline(text, line)) {
    std::istringstream words(line);
    std::string unit, pass;
    words >> unit >> pass;
    if (pass != "forward" && pass != "backward") continue;
    ++rows[unit];
    widths.insert(line.size());
  }
  std::map<std::string, int> expected;
  for (const ProfileRow& row : profile.rows())
    if (row.gathers.count > 0 || row.reductions.count > 0 || row.exposed_ms > 0)
      if (!row.unit.starts_with("(")) ++expected[row.unit];
  EXPECT_EQ(rows, expected);
  EXPECT_LE(widths.size(), 1u) << "columns are aligned";
  EXPECT_TRUE(contains(profile.describe(), "3 steps of"));
  EXPECT_EQ(contains(profile.describe(), "all units"), !expected.empty());
}

// --- traces ---

struct TraceFile {
  std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("fsdp-trace-" + std::to_string(getpid()) + ".json");
  ~TraceFile() {
    std::error_code none;
    std::filesystem::remove(path, none);
  }

  std::multiset<std::string> names() const {
    std::ifstream file(path);
    nlohmann::json json = nlohmann::json::parse(file);
    std::multiset<std::string> all;
    for (const auto& event : json.at("traceEvents")) {
      if (event.value("ph", "") != "X") continue;
      EXPECT_TRUE(event.at("ts").is_number());
      EXPECT_TRUE(event.at("dur").is_number());
      all.insert(event.at("name").get<std::string>());
    }
    return all;
  }
};

TEST(Traces, HoldOperatorsAndTheNamesOfUnits) {
  Subject subject(options());
  TraceFile file;
  subject.sharded.record_events(true);
  trace(file.path.string(), [&] { subject.step(); });
  subject.events = subject.sharded.events();
  subject.sharded.record_events(false);
  auto names = file.names();
  EXPECT_GE(names.count("aten::addmm"), size_t{kDepth});
  for (int64_t i = 0; i < kDepth; ++i) {
    std::string unit = "layers." + std::to_string(i);
    SCOPED_TRACE(unit);
    auto both = [&](Event::Kind kind) {
      return static_cast<size_t>(subject.events_of(kind, unit, false) +
                                 subject.events_of(kind, unit, true));
    };
    EXPECT_GE(names.count("reshard " + unit), both(Event::kResharded));
    if (world_size() == 1) continue;
    // A GPU's trace has each of them a second time, where its kernels ran.
    EXPECT_GE(names.count("gather " + unit), both(Event::kGatherIssued));
    EXPECT_GE(names.count("reduce " + unit), 1u);
    if (test_device().is_cpu()) {
      EXPECT_EQ(names.count("gather " + unit), both(Event::kGatherIssued));
      EXPECT_EQ(names.count("reduce " + unit), 1u);
    }
  }
}

TEST(Traces, OneAtATimeAndAgainAfterAnError) {
  TraceFile file;
  auto nested = [&] { trace(file.path.string(), [&] { trace(file.path.string(), [] {}); }); };
  expect_error(nested, {"already"});
  expect_error([&] { trace(file.path.string(), [] { throw Error("stop.", ""); }); }, {"stop"});
  EXPECT_FALSE(std::filesystem::exists(file.path));
  trace(file.path.string(), [] { at::ones({2}).neg(); });
  EXPECT_EQ(file.names().count("aten::neg"), 1u);
}

TEST(Traces, AFileThatCannotBeWrittenIsAnError) {
  expect_error([] { trace("/no/such/folder/trace.json", [] {}); },
               {"/no/such/folder/trace.json", "write"});
}

}  // namespace
}  // namespace fsdp::testing
