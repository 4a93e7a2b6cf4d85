#include "shard/world.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "fsdp/fully_shard.h"

namespace fsdp::testing {
namespace {

std::optional<World> world;
std::optional<DeviceMesh> mesh;
std::vector<std::pair<torch::nn::Linear, Sharded>> kept;
int texts = 0;

// Models with the default mesh share the communicators of one that is alive; creating a set takes
// NCCL some tenths of a second.
void keep_communicators() {
  for (auto strategy :
       {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP, ShardingStrategy::NO_SHARD})
    for (bool share : {true, false}) {
      torch::nn::Linear model(1, 1);
      Sharded sharded = fully_shard(
          model, {.strategy = strategy, .device = world->device(), .share_host_memory = share});
      kept.emplace_back(model, sharded);
    }
}

double reduced(double mine, ReduceOp op) {
  auto tensor = at::full({1}, mine, at::TensorOptions().dtype(at::kDouble).device(test_device()));
  test_world().comm().all_reduce(tensor, op);
  return tensor.item<double>();
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return tolower(c); });
  return text;
}

// Prints failures with their rank, and ends a test that one rank left early.
class RankListener : public ::testing::EmptyTestEventListener {
 public:
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    left_early_ |= result.fatally_failed();
    std::fprintf(stderr, "rank %d: %s:%d: %s\n", rank(),
                 result.file_name() ? result.file_name() : "?", result.line_number(),
                 result.message());
  }

  void OnTestEnd(const ::testing::TestInfo& test) override {
    if (world_size() == 1) return;
    std::string key = "test-end/" + std::to_string(++ended_) + "/";
    auto store = test_world().store();
    store->set(key + std::to_string(rank()), std::vector<uint8_t>{1});
    if (!left_early_) return;
    left_early_ = false;
    std::vector<std::string> everybody;
    for (int r = 0; r < world_size(); ++r) everybody.push_back(key + std::to_string(r));
    try {
      store->wait(everybody, std::chrono::seconds(5));
    } catch (const std::exception&) {
      std::fprintf(stderr, "rank %d left %s.%s alone and ends here, so that nobody waits for it.\n",
                   rank(), test.test_suite_name(), test.name());
      std::fflush(nullptr);
      std::_Exit(1);
    }
  }

 private:
  bool left_early_ = false;
  int ended_ = 0;
};

}  // namespace

const World& test_world() {
  if (!world) {
    world = init();
    if (world->backend() == "nccl") keep_communicators();
  }
  return *world;
}

void leave_world() {
  kept.clear();
  mesh.reset();
  world.reset();
}

at::Device test_device() {
  return test_world().backend() == "nccl" ? test_world().device() : at::Device(at::kCPU);
}

const DeviceMesh& hybrid_mesh() {
  if (!mesh)
    mesh.emplace(test_world(),
                 std::vector<MeshDimension>{{"replicate", 2}, {"shard", world_size() / 2}});
  return *mesh;
}

bool on_every_rank(bool mine) {
  return reduced(mine, ReduceOp::SUM) == world_size();
}

bool on_any_rank(bool mine) {
  return reduced(mine, ReduceOp::SUM) > 0;
}

double sum_over_ranks(double mine) {
  return reduced(mine, ReduceOp::SUM);
}

std::string text_of_rank_0(const std::string& mine) {
  std::string key = "text-of-rank-0/" + std::to_string(++texts);
  auto store = test_world().store();
  if (rank() == 0) store->set(key, std::vector<uint8_t>(mine.begin(), mine.end()));
  auto bytes = store->get(key);
  return std::string(bytes.begin(), bytes.end());
}

std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const std::exception& error) {
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

bool contains(const std::string& text, const std::string& word) {
  return lower(text).find(lower(word)) != std::string::npos;
}

void expect_error(const std::function<void()>& act, const std::vector<std::string>& words,
                  const std::vector<std::string>& one_of) {
  std::string error = error_of(act);
  if (error.empty()) return;
  for (const auto& word : words)
    EXPECT_TRUE(contains(error, word)) << "\"" << word << "\" is not in: " << error;
  bool has_one = one_of.empty() || std::any_of(one_of.begin(), one_of.end(), [&](const auto& word) {
                   return contains(error, word);
                 });
  EXPECT_TRUE(has_one) << "says nothing of \"" << one_of.front() << "\": " << error;
}

}  // namespace fsdp::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  int result = 0;
  if (::testing::GTEST_FLAG(list_tests)) return RUN_ALL_TESTS();
  try {
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    if (fsdp::testing::rank() != 0) delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new fsdp::testing::RankListener);
    result = RUN_ALL_TESTS();
    if (::testing::UnitTest::GetInstance()->test_to_run_count() == 0) {
      std::fprintf(stderr, "no test has such a name.\n");
      result = 1;
    }
    fsdp::testing::leave_world();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return result;
}
