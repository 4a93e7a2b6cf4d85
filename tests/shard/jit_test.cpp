// A model written in Python: exported by PyTorch, loaded with torch::jit::load, sharded by the same
// call, and compared with a plain copy.
#include <ATen/ATen.h>
#include <stdlib.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/import.h>

#include <cstdlib>
#include <filesystem>

#include "paths.h"
#include "shard/oracle.h"

namespace fsdp::testing {
namespace {

// The exported file, the same for every rank; "" if no Python has torch.
std::string exported() {
  static const std::string path = [] {
    std::string mine;
    if (rank() == 0) {
      std::string folder = (std::filesystem::temp_directory_path() / "fsdp-jit-XXXXXX").string();
      const char* python = std::getenv("FSDP_TEST_PYTHON");
      if (mkdtemp(folder.data())) {
        mine = folder + "/net.pt";
        std::string command = std::string(python ? python : "python3") + " " +
                              paths::source("tests/shard/export_jit.py") + " " + mine + " > " +
                              folder + "/log 2>&1";
        if (std::system(command.c_str()) != 0) {
          std::filesystem::remove_all(folder);
          mine.clear();
        }
      }
    }
    return text_of_rank_0(mine);
  }();
  return path;
}

Built load() {
  auto module = std::make_shared<torch::jit::Module>(torch::jit::load(exported(), test_device()));
  Built result;
  for (const auto& item : module->named_parameters())
    result.parameters.emplace_back(item.name, item.value);
  for (const auto& item : module->named_buffers())
    result.buffers.emplace_back(item.name, item.value);
  result.loss = [module](const Batch& batch) {
    return module->forward({batch.x, batch.y}).toTensor().squeeze();
  };
  return result;
}

const ModelCase& jit_case() {
  static const ModelCase model{.name = "jit", .build = load, .batch = [](int step, int rank) {
                                 return model_case("transformer").batch(step, rank);
                               }};
  return model;
}

class Jit : public ::testing::Test {
 protected:
  void SetUp() override {
    if (exported().empty())
      GTEST_SKIP() << "no Python with torch: FSDP_TEST_PYTHON names one; ./fsdp test makes it";
    module_ = torch::jit::load(exported(), test_device());
  }

  static void TearDownTestSuite() {
    if (on_every_rank(!exported().empty()) && rank() == 0)  // no rank reads it any more
      std::filesystem::remove_all(std::filesystem::path(exported()).parent_path());
  }

  // Trains it beside a plain copy.
  void train(ShardOptions options) {
    options.device = test_device();
    Built mine;
    auto sharded = fully_shard(module_, options);
    for (const auto& item : module_.named_parameters())
      mine.parameters.emplace_back(item.name, item.value);
    for (const auto& item : module_.named_buffers())
      mine.buffers.emplace_back(item.name, item.value);
    mine.loss = [this](const Batch& batch) {
      return module_.forward({batch.x, batch.y}).toTensor().squeeze();
    };
    SideBySide both(jit_case(), mine, sharded,
                    Oracle(jit_case(), load(), world_size(), options.mixed_precision));
    both.expect_same_parameters();
    both.train(4);  // a profiling executor would optimize after two
  }

  torch::jit::Module module_;
};

TEST_F(Jit, TrainsAsInOneProcess) {
  for (bool share : {true, false}) {
    module_ = torch::jit::load(exported(), test_device());
    train({.wrap = wrap::types({"Block"}), .share_host_memory = share});
  }
}

TEST_F(Jit, TrainsAsInOneProcessUnderEveryStrategy) {
  for (auto strategy : {ShardingStrategy::SHARD_GRAD_OP, ShardingStrategy::NO_SHARD}) {
    SCOPED_TRACE(name(strategy));
    module_ = torch::jit::load(exported(), test_device());
    train({.wrap = wrap::names({"blocks.*"}), .strategy = strategy});
  }
}

TEST_F(Jit, TrainsInBf16) {
  train({.wrap = wrap::types({"Block"}), .mixed_precision = bf16_precision()});
}

TEST_F(Jit, UnitsAreFoundByTypeAndByPath) {
  auto by_type = fully_shard(module_, {.wrap = wrap::types({"Block"}), .device = test_device()});
  auto other = torch::jit::load(exported(), test_device());
  auto by_path = fully_shard(other, {.wrap = wrap::names({"blocks.*"}), .device = test_device()});
  for (const auto* sharded : {&by_type, &by_path}) {
    EXPECT_EQ(sharded->units().size(), 4u);
    EXPECT_EQ(sharded->unit("blocks.2").numel(), sharded->unit("blocks.0").numel());
    EXPECT_TRUE(contains(sharded->describe(), "Block")) << sharded->describe();
  }
}

TEST_F(Jit, TheExecutorSettingIsMadeAndSaid) {
  torch::jit::setGraphExecutorOptimize(true);
  ::testing::internal::CaptureStderr();
  auto sharded = fully_shard(module_, {.wrap = wrap::types({"Block"}), .device = test_device()});
  std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_FALSE(torch::jit::getGraphExecutorOptimize());
  EXPECT_TRUE(on_any_rank(contains(said, "executor"))) << said;
}

}  // namespace
}  // namespace fsdp::testing
