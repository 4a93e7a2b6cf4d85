// Old habits: code that doesn't know the model is sharded. Each works, or is an error that says
// what to write instead; none fails silently, on one rank or on many.
#include <ATen/ATen.h>
#include <torch/nn/init.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include <sstream>

#include "shard/uses.h"

namespace fsdp::testing {
namespace {

class Habits : public Uses {};
INSTANTIATE_TEST_SUITE_P(Memory, Habits, ::testing::Bool(), memory_name);

const std::vector<std::string> kOptimizers = {"sharded.parameters()", "fsdp::AdamW"};
const std::vector<std::string> kWriting = {"summon_full_params", "load_full_state_dict"};
const std::vector<std::string> kReading = {"full_tensor", "full_state_dict", "summon_full_params"};

void backward(SideBySide& both, int step = 0) {
  both.run_mine(both.work(step));
}

// The error has left nothing behind.
void expect_right_numbers(SideBySide& both) {
  both.zero_grad();
  both.expect_same_parameters();
  both.train(2);
}

// With one rank a gathered parameter is the only copy, so the write can't be undone.
void expect_right_numbers_unless_alone(SideBySide& both) {
  if (world_size() > 1) expect_right_numbers(both);
}

TEST_P(Habits, AnOptimizerOnTheModelsParametersIsAnErrorAtItsStep) {
  SideBySide both(model_case("mlp"), options());
  auto parameters = both.mine().module->parameters();
  torch::optim::SGD sgd(parameters, torch::optim::SGDOptions(0.1));
  torch::optim::AdamW adamw(parameters, torch::optim::AdamWOptions(0.1));
  torch::optim::SGD decaying(parameters, torch::optim::SGDOptions(0.1).weight_decay(0.1));
  for (torch::optim::Optimizer* optimizer :
       std::initializer_list<torch::optim::Optimizer*>{&sgd, &adamw, &decaying}) {
    backward(both);
    expect_error([&] { optimizer->step(); }, {"layers."}, kOptimizers);
  }
  expect_right_numbers(both);
}

TEST_P(Habits, ClippingTheModelsParametersIsAnError) {
  SideBySide both(model_case("mlp"), options());
  backward(both);
  expect_error([&] { nn::utils::clip_grad_norm_(both.mine().module->parameters(), 0.1); }, {},
               {"sharded.clip_grad_norm_"});
  expect_error([&] { nn::utils::clip_grad_value_(both.mine().module->parameters(), 0.1); }, {},
               {"sharded.clip_grad_norm_"});
  expect_right_numbers(both);
}

TEST_P(Habits, ReadingAParametersGradSaysWhereTheGradientIs) {
  SideBySide both(model_case("mlp"), options());
  backward(both);
  auto weight = both.mine().parameter("layers.2.weight");
  expect_error([&] { weight.grad().norm().item<float>(); }, {"layers.2.weight"}, {"full_grad"});
  expect_right_numbers(both);
}

TEST_P(Habits, WritingToAParameterIsAnErrorThatNamesIt) {
  SideBySide both(model_case("mlp"), options());
  auto weight = both.mine().parameter("layers.2.weight");
  auto ones = at::ones_like(weight.detach());
  std::vector<std::pair<const char*, std::function<void()>>> writes = {
      {"add_", [&] { weight.add_(1); }},
      {"copy_", [&] { weight.copy_(ones); }},
      {"zero_", [&] { weight.zero_(); }},
      {"normal_", [&] { nn::init::normal_(weight); }},
      {"mul_out", [&] { at::mul_out(weight, ones, ones); }},
      {"_foreach_add_",
       [&] {
         at::_foreach_add_({weight, weight}, 1);
       }},
      {"index_put_", [&] { weight.index_put_({at::zeros({1}, at::kLong)}, 1); }},
  };
  for (const auto& [what, write] : writes) {
    SCOPED_TRACE(what);
    both.sharded().reshard();
    at::NoGradGuard no_grad;
    expect_error(write, {"layers.2.weight"}, kWriting);
  }
  expect_right_numbers(both);
}

// A view is first read, which gathers it, and then written, so the write is found a little later.
TEST_P(Habits, WritingThroughAViewIsFoundAtTheLatestWhenItsUnitIsGivenUp) {
  SideBySide both(model_case("mlp"), options());
  auto weight = both.mine().parameter("layers.2.weight");
  std::vector<std::pair<const char*, std::function<void()>>> writes = {
      {"fill_ of a view", [&] { weight.view({-1}).fill_(1); }},
      {"assignment to a row", [&] { weight[0] = 1; }},
      {"fill_ of detach()", [&] { weight.detach().fill_(1); }},
  };
  for (const auto& [what, write] : writes) {
    SCOPED_TRACE(what);
    auto act = [&] {
      {
        at::NoGradGuard no_grad;
        write();
      }
      both.sharded().reshard();
      backward(both);
    };
    expect_error(act, {"layers.2.weight"}, kWriting);
    both.sharded().reshard();
  }
  expect_right_numbers_unless_alone(both);
}

TEST_P(Habits, WritingToAGatheredParameterIsFoundWhenItsUnitIsGivenUp) {
  SideBySide both(model_case("mlp"), options());
  auto weight = both.mine().parameter("layers.2.weight");
  auto act = [&] {
    weight.sum();  // gathers
    {
      at::NoGradGuard no_grad;
      weight.add_(1);
    }
    both.sharded().reshard();
  };
  expect_error(act, {"layers.2.weight"}, kWriting);
  both.sharded().reshard();
  expect_right_numbers_unless_alone(both);
}

TEST_P(Habits, ARawReadIsAnErrorThatSaysWhatToReadInstead) {
  SideBySide both(model_case("mlp"), options());
  auto weight = both.mine().parameter("layers.2.weight");
  both.sharded().reshard();
  expect_error([&] { weight.data_ptr(); }, {}, kReading);
  expect_error([&] { weight.data_ptr<float>(); }, {}, kReading);
  expect_error([&] { weight.const_data_ptr<float>(); }, {}, kReading);
  expect_error([&] { weight.storage().data(); }, {}, kReading);
  if (test_device().type() == at::kCPU)
    expect_error([&] { weight.accessor<float, 2>(); }, {}, kReading);
  expect_right_numbers(both);
}

TEST_P(Habits, SavingTheModuleWorksOrSaysHowToSave) {
  SideBySide both(model_case("mlp"), options());
  both.sharded().reshard();
  std::ostringstream stream;
  try {
    torch::save(both.mine().module, stream);
  } catch (const std::exception& error) {
    EXPECT_TRUE(contains(error.what(), "full_state_dict")) << error.what();
    return expect_right_numbers(both);
  }
  auto copy = build_seeded(model_case("mlp"), /*seed=*/99);
  std::istringstream input(stream.str());
  torch::load(copy.module, input);
  for (const auto& [name, value] : copy.parameters)
    EXPECT_TRUE(at::equal(value, both.sharded().full_tensor(name).cpu())) << name;
}

TEST_P(Habits, LoadingIntoTheModuleIsFoundAndNamed) {
  SideBySide both(model_case("mlp"), options());
  std::ostringstream stream;
  torch::save(build_seeded(model_case("mlp"), /*seed=*/99).module, stream);
  auto act = [&] {
    std::istringstream input(stream.str());
    torch::load(both.mine().module, input);
    backward(both);
  };
  expect_error(act, {"layers.0", "load_full_state_dict"});
}

TEST_P(Habits, ConvertingTheModuleIsFoundAndNamedAtTheLatestByTheNextBackward) {
  SideBySide both(model_case("mlp"), options());
  auto act = [&] {
    both.mine().module->to(at::kBFloat16);
    auto data = batch(0, rank());
    both.mine().loss({0, data.x.to(at::kBFloat16), data.y}).backward();
  };
  expect_error(act, {"layers.0"}, {"mixed_precision", ".device"});
}

TEST_P(Habits, ConvertingTheModuleToWhatItIsChangesNothing) {
  SideBySide both(model_case("mlp"), options());
  both.mine().module->to(at::kFloat);
  both.mine().module->to(test_device());
  both.mine().module->train();
  both.mine().module->eval();
  expect_right_numbers(both);
}

TEST_P(Habits, AssigningFromAVectorIsFoundAndNamed) {
  SideBySide both(model_case("mlp"), options());
  auto act = [&] {
    auto vector = nn::utils::parameters_to_vector(both.mine().module->parameters()).detach();
    nn::utils::vector_to_parameters(vector, both.mine().module->parameters());
    backward(both);
  };
  expect_error(act, {"layers."}, kWriting);
}

TEST_P(Habits, AClonedModelIsAPlainCopy) {
  SideBySide both(model_case("mlp"), options());
  both.train(1);
  auto copy = both.mine().module->clone();
  EXPECT_FALSE(is_sharded(copy));
  for (const auto& item : copy->named_parameters()) {
    EXPECT_TRUE(at::equal(item.value(), both.sharded().full_tensor(item.key()))) << item.key();
    EXPECT_NO_THROW(item.value().data_ptr());
  }
  auto mlp = std::dynamic_pointer_cast<MlpImpl>(copy);
  auto loss = mean_square(mlp->forward(batch(0, rank()).x), batch(0, rank()).y);
  loss.backward();  // of the copy only
  EXPECT_TRUE(mlp->layer(0)->weight.grad().defined());
  EXPECT_FALSE(both.sharded().full_grad("layers.0.weight").defined());
  both.train(2, 1);
}

TEST_P(Habits, ReadingAWeightWorks) {
  SideBySide both(model_case("mlp"), options());
  auto weight = both.mine().parameter("layers.2.weight");
  auto plain = both.oracle().plain().parameter("layers.2.weight");
  EXPECT_EQ(weight.norm().item<float>(), plain.norm().item<float>());
  EXPECT_EQ(weight[1][2].item<float>(), plain[1][2].item<float>());
  EXPECT_TRUE(at::equal(weight.clone(), plain));
  auto copy = at::empty_like(plain);
  at::NoGradGuard no_grad;
  copy.copy_(weight);
  EXPECT_TRUE(at::equal(copy, plain));
  std::ostringstream text, expected;
  text << weight;
  expected << plain;
  EXPECT_EQ(text.str(), expected.str());
}

TEST_P(Habits, AViewThatIsHeldStaysReadable) {
  SideBySide both(model_case("mlp"), options());
  auto view = both.mine().parameter("layers.2.weight").t();
  backward(both);
  EXPECT_TRUE(at::equal(view, both.oracle().plain().parameter("layers.2.weight").t()));
  view = at::Tensor();
  expect_right_numbers(both);
}

TEST_P(Habits, ShardingTwiceChangesNothingOrSaysSo) {
  SideBySide both(model_case("mlp"), options());
  try {
    fully_shard(both.mine().module, options());
  } catch (const Error& error) {
    EXPECT_TRUE(contains(error.what(), "already")) << error.what();
  }
  expect_right_numbers(both);
}

TEST_P(Habits, AModelStaysShardedWhenItsHandleIsGone) {
  const auto& model = model_case("mlp");
  auto mine = build_seeded(model), plain = build_reference(model, {}, test_device());
  auto shard_options = options();
  shard_options.wrap = model.wrap;
  fully_shard(mine.module, shard_options);
  EXPECT_TRUE(is_sharded(mine.module));
  auto loss = mine.loss(batch(0, rank())), expected = plain.loss(batch(0, rank()));
  EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-6 * expected.item<double>());
  EXPECT_NO_THROW(loss.backward());
}

TEST_P(Habits, AGraphThatOutlivesModelAndHandleWorksOrSaysSo) {
  at::Tensor loss;
  {
    SideBySide both(model_case("mlp"), options());
    loss = both.mine().loss(batch(0, rank()));
  }
  try {
    loss.backward();
  } catch (const Error& error) {
    EXPECT_TRUE(contains(error.what(), "gone")) << error.what();
  }
}

}  // namespace
}  // namespace fsdp::testing
