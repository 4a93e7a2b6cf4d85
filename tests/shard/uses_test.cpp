// Everything users do with graphs, each against the oracle: graphs used twice or not at all,
// gradient penalties, exceptions, several models, functions that keep weights.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <thread>

#include "fsdp/optim.h"
#include "shard/uses.h"

namespace fsdp::testing {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

INSTANTIATE_TEST_SUITE_P(Memory, Uses, ::testing::Bool(), memory_name);

TEST_P(Uses, SeveralForwardsBeforeOneBackward) {
  SideBySide both(model_case("transformer"), options());
  for (int step = 0; step < 3; ++step) {
    both.run([&](Built& model, int rank) {
      auto loss = model.loss(batch(step, rank, "transformer")) +
                  2 * model.loss(batch(step + 10, rank, "transformer"));
      loss.backward();
      return loss;
    });
    both.step();
    both.zero_grad();
  }
}

TEST_P(Uses, ForwardsWithoutGradientInBetween) {
  SideBySide both(model_case("transformer"), options());
  for (int step = 0; step < 3; ++step) {
    both.run([&](Built& model, int rank) {
      auto loss = model.loss(batch(step, rank, "transformer"));
      {
        at::NoGradGuard no_grad;
        model.loss(batch(step + 10, rank, "transformer"));
      }
      {
        c10::InferenceMode inference;
        model.loss(batch(step + 20, rank, "transformer"));
      }
      loss.backward();
      return loss;
    });
    both.step();
    both.zero_grad();
  }
}

TEST_P(Uses, ASecondBackwardThroughARetainedGraph) {
  SideBySide both(model_case("mlp"), options());
  for (int step = 0; step < 3; ++step) {
    both.run([&](Built& model, int rank) {
      auto loss = model.loss(batch(step, rank));
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
      return loss;
    });
    both.step();
    both.zero_grad();
  }
}

TEST_P(Uses, AutogradGradGivesThisRanksOwnGradientAndLeavesNone) {
  SideBySide both(model_case("mlp"), options());
  auto gradients_of = [&](Built& model) {
    auto loss = model.loss(batch(0, rank()));
    return torch::autograd::grad(
        {loss}, {model.parameter("layers.0.weight"), model.parameter("layers.5.bias")});
  };
  auto own = gradients_of(both.mine()), expected = gradients_of(both.oracle().plain());
  for (size_t i = 0; i < own.size(); ++i)
    EXPECT_LE((own[i] - expected[i]).norm().item<double>(),
              1e-6 * expected[i].norm().item<double>());
  EXPECT_FALSE(both.sharded().full_grad("layers.0.weight").defined());
  both.train(2);
}

TEST_P(Uses, AGradientPenalty) {
  SideBySide both(model_case("mlp"), options());
  for (int step = 0; step < 3; ++step) {
    both.run([&](Built& model, int rank) {
      auto data = batch(step, rank);
      data.x.requires_grad_(true);
      auto loss = model.loss(data);
      auto gradient = torch::autograd::grad({loss}, {data.x}, {}, true, /*create_graph=*/true)[0];
      loss = loss + (10 * gradient.norm() - 1).square();
      loss.backward();
      return loss;
    });
    both.step();
    both.zero_grad();
  }
}

TEST_P(Uses, APenaltyOnTheGradientsOfWeights) {
  SideBySide both(model_case("mlp"), options());
  both.run([&](Built& model, int rank) {
    auto loss = model.loss(batch(0, rank));
    auto gradients = torch::autograd::grad(
        {loss}, {model.parameter("layers.1.weight"), model.parameter("layers.6.weight")}, {}, true,
        /*create_graph=*/true);
    loss = loss + gradients[0].square().sum() +
           (gradients[1] * model.parameter("layers.6.weight")).sum();
    loss.backward();
    return loss;
  });
  both.step();
  both.zero_grad();
  both.train(2, 1);
}

TEST_P(Uses, BackwardOfAnotherThread) {
  SideBySide both(model_case("mlp"), options());
  both.run([&](Built& model, int rank) {
    auto loss = model.loss(batch(0, rank));
    std::thread([&] { loss.backward(); }).join();
    return loss;
  });
}

// --- errors, after which training goes on with right numbers ---

// Runs `act`, which must throw on every rank, then takes steps as if nothing had happened.
void expect_error_then_right_numbers(SideBySide& both, const std::function<void()>& act,
                                     const std::string& word) {
  std::string error = error_of(act);
  EXPECT_TRUE(contains(error, word)) << error;
  both.sharded().zero_grad();
  both.train(3);
}

TEST_P(Uses, ATensorChangedInPlaceAfterItWasSavedIsAnError) {
  SideBySide both(model_case("mlp"), options());
  auto act = [&] {
    auto data = batch(0, rank());
    auto y = std::dynamic_pointer_cast<MlpImpl>(both.mine().module)->forward(data.x).exp();
    y.add_(1);  // exp's backward needs y as it was
    y.sum().backward();
  };
  expect_error_then_right_numbers(both, act, "in place");
}

TEST_P(Uses, AnOptimizerStepBetweenForwardAndBackwardIsAnError) {
  for (bool one_unit : {false, true}) {
    auto shard_options = options();
    if (one_unit) shard_options.wrap = [](const ModuleView&) { return false; };
    SideBySide both(model_case("mlp"), shard_options);
    both.train(1);
    auto act = [&] {
      auto first = both.mine().loss(batch(1, rank()));
      auto second = both.mine().loss(batch(2, rank()));
      first.backward();
      SGD optimizer(both.sharded(), {.lr = 0});  // changes no value
      optimizer.step();
      second.backward();
    };
    EXPECT_TRUE(contains(error_of(act), "in place"));
    both.sharded().zero_grad();
    both.train(2, 1);
  }
}

TEST_P(Uses, AnExceptionInForward) {
  SideBySide both(model_case("transformer"), options());
  auto act = [&] {
    auto model = std::dynamic_pointer_cast<TransformerImpl>(both.mine().module);
    auto h = model->embedding(batch(0, rank(), "transformer").x) + model->position;
    h = model->block(0)->forward(h);
    throw std::runtime_error("the data ended");
  };
  expect_error_then_right_numbers(both, act, "the data ended");
}

TEST_P(Uses, AWrongShapeInForward) {
  SideBySide both(model_case("mlp"), options());
  auto act = [&] {
    both.mine().loss({0, at::ones({4, 5}, test_device()), at::ones({4, 16}, test_device())});
  };
  expect_error_then_right_numbers(both, act, "");
}

struct Explode : torch::autograd::Function<Explode> {
  static at::Tensor forward(AutogradContext*, at::Tensor x) { return x * 1; }
  static variable_list backward(AutogradContext*, variable_list) {
    throw std::runtime_error("exploded");
  }
};

TEST_P(Uses, AnExceptionInTheMiddleOfBackward) {
  for (bool accumulating : {false, true}) {
    SideBySide both(model_case("mlp"), options());
    auto act = [&] {
      std::optional<NoSync> guard;
      if (accumulating) guard.emplace(both.sharded().no_sync());
      auto model = std::dynamic_pointer_cast<MlpImpl>(both.mine().module);
      auto h = batch(0, rank()).x;
      for (int i = 0; i < 8; ++i) {
        h = model->layer(i)->forward(h).tanh();
        if (i == 3) h = Explode::apply(h);
      }
      h.sum().backward();
    };
    expect_error_then_right_numbers(both, act, "exploded");
  }
}

// --- unused parameters ---

TEST_P(Uses, AUnitThatIsNotUsedHasNoGradientAndStays) {
  SideBySide both(model_case("branches"), options());
  both.run(both.work(0));  // only the left branch
  EXPECT_FALSE(both.sharded().full_grad("right.0.weight").defined());
  EXPECT_TRUE(both.sharded().full_grad("left.0.weight").defined());
  auto before = both.sharded().full_tensor("right.0.weight").clone();
  both.step();
  EXPECT_TRUE(at::equal(both.sharded().full_tensor("right.0.weight"), before));
}

TEST_P(Uses, AParameterThatIsNotUsedHasAGradientOfZero) {
  auto shard_options = options();
  shard_options.wrap = [](const ModuleView&) { return false; };  // all in the root
  SideBySide both(model_case("branches"), shard_options);
  both.run(both.work(0));
  auto gradient = both.sharded().full_grad("right.0.weight");
  ASSERT_TRUE(gradient.defined());
  EXPECT_EQ(gradient.abs().sum().item<double>(), 0);
  both.step();
  both.zero_grad();
  both.train(3, 1);
}

TEST_P(Uses, NothingIsUsed) {
  SideBySide both(model_case("mlp"), options());
  auto x = at::ones({2}, test_device()).requires_grad_(true);
  x.sum().backward();  // doesn't involve the model
  EXPECT_FALSE(both.sharded().full_grad("layers.0.weight").defined());
  both.train(2);
}

TEST_P(Uses, TwoModelsInOneProcess) {
  SideBySide one(model_case("mlp"), options()), two(model_case("transformer"), options());
  for (int step = 0; step < 3; ++step) {
    one.run(one.work(step));
    two.run(two.work(step));
    two.step();
    one.step();
    one.zero_grad();
    two.zero_grad();
  }
}

TEST_P(Uses, TwoModelsInOneGraph) {
  SideBySide one(model_case("mlp"), options()), two(model_case("mlp"), options());
  for (int step = 0; step < 3; ++step) {
    auto work = [&](Built& first, Built& second, int rank) {
      auto loss = first.loss(batch(step, rank)) * second.loss(batch(step + 10, rank));
      loss.backward();
      return loss;
    };
    auto loss = work(one.mine(), two.mine(), rank());
    // Each oracle sees the other's copy, as its rank left it.
    for (auto* pair : {&one, &two}) {
      auto& other = pair == &one ? two : one;
      pair->oracle().run([&](Built& model, int rank) {
        auto value = model.loss(batch(pair == &one ? step : step + 10, rank));
        at::Tensor factor;
        {
          at::NoGradGuard no_grad;
          factor = other.oracle().plain().loss(batch(pair == &one ? step + 10 : step, rank));
        }
        auto product = value * factor;
        product.backward();
        return product;
      });
    }
    one.expect_same_loss(loss);
    one.expect_same_gradients();
    two.expect_same_gradients();
    one.step();
    two.step();
    one.zero_grad();
    two.zero_grad();
  }
}

// A function that keeps weights and a view of one, with and without autograd's knowledge.
struct Stash : torch::autograd::Function<Stash> {
  static at::Tensor forward(AutogradContext* context, at::Tensor x, at::Tensor weight) {
    context->save_for_backward({x, weight});
    context->saved_data["transposed"] = weight.t();
    return x.mm(weight);
  }
  static variable_list backward(AutogradContext* context, variable_list gradient) {
    auto saved = context->get_saved_variables();
    auto transposed = context->saved_data["transposed"].toTensor();
    return {gradient[0].mm(transposed) + 0 * gradient[0].mm(saved[1].t()),
            saved[0].t().mm(gradient[0])};
  }
};

TEST_P(Uses, FunctionsThatStashWeights) {
  SideBySide both(model_case("mlp"), options());
  for (int step = 0; step < 3; ++step) {
    both.run([&](Built& model, int rank) {
      auto data = batch(step, rank);
      auto h = data.x;
      for (int i = 0; i < 8; ++i)
        h = Stash::apply(h, model.parameter("layers." + std::to_string(i) + ".weight")).tanh();
      auto loss = mean_square(h, data.y);
      loss.backward();
      return loss;
    });
    both.zero_grad();
  }
}

TEST_P(Uses, OperatorsThatReadSeveralUnits) {
  SideBySide both(model_case("mlp"), options());
  both.run([&](Built& model, int) {
    std::vector<at::Tensor> weights;
    for (int i = 0; i < 8; ++i)
      weights.push_back(model.parameter("layers." + std::to_string(i) + ".weight"));
    auto loss = at::cat(weights).square().mean() + at::stack(weights).tanh().sum() +
                at::linalg_multi_dot(at::TensorList(weights).slice(0, 4)).mean() +
                at::addcmul(weights[0], weights[3], weights[6]).norm();
    loss.backward();
    return loss;
  });
}

}  // namespace
}  // namespace fsdp::testing
