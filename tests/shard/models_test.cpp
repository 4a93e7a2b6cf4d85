// Every model × strategy × precision: W ranks compute what one process computes on all their
// batches. docs/sharding.md lists these tests in its table of models.
#include <ATen/ATen.h>

#include "fsdp/models.h"
#include "shard/oracle.h"

namespace fsdp::testing {
namespace {

struct Cell {
  std::string model;
  ShardingStrategy strategy;
  bool bf16;
};

std::vector<Cell> cells() {
  std::vector<Cell> all;
  for (const auto& model : model_cases()) {
    for (auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP,
                          ShardingStrategy::NO_SHARD, ShardingStrategy::HYBRID_SHARD}) {
      all.push_back({model.name, strategy, false});
      if (model.bf16) all.push_back({model.name, strategy, true});
    }
  }
  return all;
}

std::string cell_name(const ::testing::TestParamInfo<Cell>& info) {
  const auto& cell = info.param;
  static const char* strategies[] = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"};
  return cell.model + "_" + strategies[static_cast<int>(cell.strategy)] +
         (cell.bf16 ? "_bf16" : "_fp32");
}

class Models : public ::testing::TestWithParam<Cell> {};

TEST_P(Models, TrainAsInOneProcess) {
  const auto& cell = GetParam();
  ShardOptions options{.strategy = cell.strategy};
  if (cell.bf16) options.mixed_precision = bf16_precision();
  if (cell.strategy == ShardingStrategy::HYBRID_SHARD) {
    if (world_size() % 2) GTEST_SKIP() << "replicate = 2 needs an even number of ranks";
    options.mesh = hybrid_mesh();
  }
  SideBySide both(model_case(cell.model), options);
  both.expect_same_parameters();
  both.train(3);
}

INSTANTIATE_TEST_SUITE_P(Table, Models, ::testing::ValuesIn(cells()), cell_name);

TEST(ModelTable, LossesFallSoThatTrainingMeansSomething) {
  const auto& model = model_case("transformer");
  auto mine = build_seeded(model);
  auto sharded = fully_shard(mine.module, {.wrap = model.wrap, .device = test_device()});
  torch::optim::SGD optimizer(sharded.parameters(), sgd_options(model));
  auto batch = moved(model.batch(0, rank()), test_device());
  double first = 0, last = 0;
  for (int i = 0; i < 12; ++i) {
    auto loss = mine.loss(batch);
    loss.backward();
    optimizer.step();
    sharded.zero_grad();
    last = loss.item<double>();
    if (i == 0) first = last;
  }
  EXPECT_LT(last, 0.8 * first);
}

TEST(ModelTable, ShardedModelsGenerateWithACacheBetweenSteps) {
  for (const char* name : {"llama_tied", "gpt2"}) {
    SCOPED_TRACE(name);
    SideBySide both(model_case(name));
    both.train(1);
    auto scores = [](Built& built) {  // of the last token, read in pieces
      torch::NoGradGuard no_grad;
      auto& model = dynamic_cast<models::CausalLMImpl&>(*built.module);
      at::Tensor ids =
          at::arange(8, at::TensorOptions(test_device()).dtype(at::kLong)).view({2, 4});
      models::KVCache cache(model.layers());
      model.logits({.ids = ids.slice(1, 0, 2), .cache = &cache});
      model.logits({.ids = ids.slice(1, 2, 3), .cache = &cache});
      return model.logits({.ids = ids.slice(1, 3), .cache = &cache});
    };
    at::Tensor expected = scores(both.oracle().plain());
    EXPECT_TRUE(at::allclose(scores(both.mine()), expected, 0, 1e-5));
    both.train(1, 1);
  }
}

}  // namespace
}  // namespace fsdp::testing
