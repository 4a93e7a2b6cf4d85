// Norms, linears and activations, each against torch's operators in float64.
#include "nn/testing.h"

namespace fsdp::nn {
namespace {

INSTANTIATE_TEST_SUITE_P(Settings, Layers, ::testing::ValuesIn(settings()), setting_name);

constexpr double kEps = 1e-5;

at::Tensor plain_rms_norm(const at::Tensor& x, const at::Tensor& weight) {
  return x * (x.square().mean(-1, true) + kEps).rsqrt() * weight;
}

at::Tensor plain_layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  at::Tensor centred = x - x.mean(-1, true);
  at::Tensor out = centred * (centred.square().mean(-1, true) + kEps).rsqrt() * weight;
  return bias.defined() ? out + bias : out;
}

at::Tensor plain_swiglu(const at::Tensor& x) {
  Tensors halves = x.chunk(2, -1);
  return halves[0] * at::sigmoid(halves[0]) * halves[1];
}

at::Tensor plain_gelu(const at::Tensor& x, bool tanh) {
  if (!tanh) return x * 0.5 * (1 + at::erf(x * std::sqrt(0.5)));
  return 0.5 * x * (1 + at::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x.pow(3))));
}

const std::vector<std::vector<int64_t>> kShapes = {{5, 8}, {2, 3, 24},  {7},
                                                   {1, 3}, {3, 5, 129}, {0, 16}};

// --- norms ---

TEST_P(Layers, RmsNorm) {
  for (const auto& sizes : kShapes)
    compare([](const Tensors& in) { return Tensors{rms_norm(in[0], in[1], kEps)}; },
            [](const Tensors& in) { return Tensors{plain_rms_norm(in[0], in[1])}; },
            {random(sizes), random({sizes.back()})});
}

TEST_P(Layers, AddRmsNormUsesBothItsResults) {
  for (const auto& sizes : kShapes) {
    auto ours = [](const Tensors& in) {
      NormedSum both = add_rms_norm(in[0], in[1], in[2], kEps);
      return Tensors{both.out, both.sum};
    };
    auto plain = [](const Tensors& in) {
      at::Tensor sum = in[0] + in[1];
      return Tensors{plain_rms_norm(sum, in[2]), sum};
    };
    compare(ours, plain, {random(sizes), random(sizes), random({sizes.back()})});
  }
}

TEST_P(Layers, AnUnusedResultOfAddRmsNormCostsNothing) {
  auto only = [](size_t which) {
    return std::pair<Function, Function>{
        [which](const Tensors& in) {
          NormedSum both = add_rms_norm(in[0], in[1], in[2], kEps);
          return Tensors{which == 0 ? both.out : both.sum};
        },
        [which](const Tensors& in) {
          at::Tensor sum = in[0] + in[1];
          return Tensors{which == 0 ? plain_rms_norm(sum, in[2]) : sum};
        }};
  };
  for (size_t which : {0, 1}) {
    auto [ours, plain] = only(which);
    compare(ours, plain, {random({4, 9}), random({4, 9}), random({9})});
  }
}

TEST_P(Layers, WithoutAResidualTheSumIsTheInput) {
  auto ours = [](const Tensors& in) {
    NormedSum both = add_rms_norm(in[0], {}, in[1], kEps);
    return Tensors{both.out, both.sum * 2};
  };
  auto plain = [](const Tensors& in) { return Tensors{plain_rms_norm(in[0], in[1]), in[0] * 2}; };
  compare(ours, plain, {random({4, 9}), random({9})});
}

TEST_P(Layers, LayerNormWithAndWithoutBias) {
  for (const auto& sizes : kShapes) {
    compare([](const Tensors& in) { return Tensors{layer_norm(in[0], in[1], in[2], kEps)}; },
            [](const Tensors& in) { return Tensors{plain_layer_norm(in[0], in[1], in[2])}; },
            {random(sizes), random({sizes.back()}), random({sizes.back()})});
    compare([](const Tensors& in) { return Tensors{layer_norm(in[0], in[1], {}, kEps)}; },
            [](const Tensors& in) { return Tensors{plain_layer_norm(in[0], in[1], {})}; },
            {random(sizes), random({sizes.back()})});
  }
}

TEST_P(Layers, AddLayerNorm) {
  auto ours = [](const Tensors& in) {
    NormedSum both = add_layer_norm(in[0], in[1], in[2], in[3], kEps);
    return Tensors{both.out, both.sum};
  };
  auto plain = [](const Tensors& in) {
    at::Tensor sum = in[0] + in[1];
    return Tensors{plain_layer_norm(sum, in[2], in[3]), sum};
  };
  for (const std::vector<size_t>& frozen : {std::vector<size_t>{}, {0}, {2}, {3}, {0, 1}, {2, 3}})
    compare(ours, plain, {random({3, 4, 17}), random({3, 4, 17}), random({17}), random({17})},
            frozen);
}

// --- linears ---

TEST_P(Layers, LinearOfAnyShapeEitherWayRound) {
  for (const auto& sizes : kShapes)
    for (bool bias : {false, true})
      for (WeightLayout layout : {WeightLayout::kOutIn, WeightLayout::kInOut}) {
        auto ours = [&](const Tensors& in) {
          return Tensors{nn::linear(in[0], in[1], bias ? in[2] : at::Tensor(), layout)};
        };
        auto plain = [&](const Tensors& in) {
          at::Tensor weight = layout == WeightLayout::kOutIn ? in[1].t() : in[1];
          at::Tensor out = at::matmul(in[0], weight);
          return Tensors{bias ? out + in[2] : out};
        };
        int64_t in = sizes.back(), out = 6;
        Tensors inputs{random(sizes),
                       layout == WeightLayout::kOutIn ? random({out, in}) : random({in, out})};
        if (bias) inputs.push_back(random({out}));
        compare(ours, plain, inputs);
      }
}

TEST_P(Layers, LinearGivesNoGradientThatIsNotWanted) {
  auto ours = [](const Tensors& in) { return Tensors{nn::linear(in[0], in[1], in[2])}; };
  auto plain = [](const Tensors& in) { return Tensors{at::matmul(in[0], in[1].t()) + in[2]}; };
  for (const std::vector<size_t>& frozen :
       {std::vector<size_t>{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 2}})
    compare(ours, plain, {random({3, 5}), random({4, 5}), random({4})}, frozen);
}

// Separate weights, and weights in one buffer like those of a sharded unit.
TEST_P(Layers, NormLinearsApartAndSideBySide) {
  std::vector<int64_t> widths = {6, 2, 3};
  for (bool together : {false, true})
    for (bool bias : {false, true}) {
      auto parts = [&](const Tensors& in) {
        std::pair<Tensors, Tensors> all;
        int64_t at = 0;
        for (size_t i = 0; i < widths.size(); ++i) {
          all.first.push_back(together ? in[3].narrow(0, at, widths[i]) : in[3 + i]);
          at::Tensor whole = in.back();
          all.second.push_back(together ? whole.narrow(0, at, widths[i])
                                        : in[in.size() - widths.size() + i]);
          at += widths[i];
        }
        if (!bias) all.second.clear();
        return all;
      };
      auto ours = [&](const Tensors& in) {
        auto [weights, biases] = parts(in);
        NormedLinears made = norm_linears(in[0], in[1], in[2], kEps, weights, biases);
        return Tensors{made.out, made.sum};
      };
      auto plain = [&](const Tensors& in) {
        auto [weights, biases] = parts(in);
        at::Tensor sum = in[0] + in[1];
        at::Tensor out = at::matmul(plain_rms_norm(sum, in[2]), at::cat(weights).t());
        return Tensors{bias ? out + at::cat(biases) : out, sum};
      };
      Tensors inputs{random({2, 5, 8}), random({2, 5, 8}), random({8})};
      if (together) {
        inputs.push_back(random({11, 8}));
        if (bias) inputs.push_back(random({11}));
      } else {
        for (int64_t width : widths) inputs.push_back(random({width, 8}));
        for (int64_t width : widths)
          if (bias) inputs.push_back(random({width}));
      }
      compare(ours, plain, inputs);
    }
}

TEST_P(Layers, NormLinearsWithFrozenParts) {
  auto ours = [](const Tensors& in) {
    return Tensors{norm_linears(in[0], {}, in[1], kEps, {in[2], in[3]}).out};
  };
  auto plain = [](const Tensors& in) {
    return Tensors{at::matmul(plain_rms_norm(in[0], in[1]), at::cat({in[2], in[3]}).t())};
  };
  for (const std::vector<size_t>& frozen :
       {std::vector<size_t>{0}, {1}, {2}, {3}, {0, 1}, {2, 3}, {0, 1, 2}, {1, 2, 3}})
    compare(ours, plain, {random({5, 8}), random({8}), random({3, 8}), random({4, 8})}, frozen);
}

TEST_P(Layers, SeveralLinearsApartAndSideBySide) {
  for (bool together : {false, true})
    for (bool bias : {false, true}) {
      auto weights = [&](const Tensors& in) {
        return together ? in[1].split_with_sizes({6, 2}) : Tensors{in[1], in[2]};
      };
      auto biases = [&](const Tensors& in) {
        return bias ? Tensors{in[in.size() - 2], in.back()} : Tensors{};
      };
      auto ours = [&](const Tensors& in) {
        return Tensors{linears(in[0], weights(in), biases(in))};
      };
      auto plain = [&](const Tensors& in) {
        at::Tensor out = at::matmul(in[0], at::cat(weights(in)).t());
        return Tensors{bias ? out + at::cat(biases(in)) : out};
      };
      Tensors inputs{random({2, 5, 8}), random({together ? 8 : 6, 8})};
      if (!together) inputs.push_back(random({2, 8}));
      for (int64_t width : {6, 2})
        if (bias) inputs.push_back(random({width}));
      for (const std::vector<size_t>& frozen : {std::vector<size_t>{}, {0}, {1}, {0, 1}})
        compare(ours, plain, inputs, frozen);
    }
}

TEST_P(Layers, LayerNormLinearsEitherWayRound) {
  for (WeightLayout layout : {WeightLayout::kOutIn, WeightLayout::kInOut}) {
    auto ours = [&](const Tensors& in) {
      NormedLinears made = layer_norm_linears(in[0], in[1], in[2], in[3], kEps, {in[4], in[5]},
                                              {in[6], in[7]}, layout);
      return Tensors{made.out, made.sum};
    };
    auto plain = [&](const Tensors& in) {
      at::Tensor sum = in[0] + in[1];
      bool rows = layout == WeightLayout::kOutIn;
      at::Tensor weight = rows ? at::cat({in[4], in[5]}).t() : at::cat({in[4], in[5]}, 1);
      at::Tensor out = at::matmul(plain_layer_norm(sum, in[2], in[3]), weight);
      return Tensors{out + at::cat({in[6], in[7]}), sum};
    };
    auto matrix = [&](int64_t out) {
      return layout == WeightLayout::kOutIn ? random({out, 10}) : random({10, out});
    };
    compare(ours, plain,
            {random({7, 10}), random({7, 10}), random({10}), random({10}), matrix(4), matrix(3),
             random({4}), random({3})});
  }
}

// --- activations ---

TEST_P(Layers, Swiglu) {
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{5, 8}, {2, 3, 26}, {2}, {0, 4}})
    compare([](const Tensors& in) { return Tensors{swiglu(in[0])}; },
            [](const Tensors& in) { return Tensors{plain_swiglu(in[0])}; }, {random(sizes, 2)});
}

TEST_P(Layers, Gelu) {
  for (const char* approximate : {"none", "tanh"})
    for (const auto& sizes : kShapes)
      compare([&](const Tensors& in) { return Tensors{nn::gelu(in[0], approximate)}; },
              [&](const Tensors& in) {
                return Tensors{plain_gelu(in[0], approximate == std::string("tanh"))};
              },
              {random(sizes, 2)});
}

TEST_P(Layers, SwigluLinear) {
  auto ours = [](const Tensors& in) { return Tensors{swiglu_linear(in[0], in[1])}; };
  auto plain = [](const Tensors& in) {
    return Tensors{at::matmul(plain_swiglu(in[0]), in[1].t())};
  };
  for (const std::vector<size_t>& frozen : {std::vector<size_t>{}, {0}, {1}})
    compare(ours, plain, {random({2, 3, 14}), random({5, 7})}, frozen);
}

TEST_P(Layers, GegluLinear) {
  auto ours = [](const Tensors& in) { return Tensors{geglu_linear(in[0], in[1], in[2])}; };
  auto plain = [](const Tensors& in) {
    Tensors halves = in[0].chunk(2, -1);
    return Tensors{at::matmul(plain_gelu(halves[0], true) * halves[1], in[1].t()) + in[2]};
  };
  for (const std::vector<size_t>& frozen : {std::vector<size_t>{}, {0}, {1}, {2}})
    compare(ours, plain, {random({2, 3, 14}, 2), random({5, 7}), random({5})}, frozen);
}

TEST_P(Layers, GeluLinear) {
  for (WeightLayout layout : {WeightLayout::kOutIn, WeightLayout::kInOut}) {
    auto ours = [&](const Tensors& in) {
      return Tensors{gelu_linear(in[0], in[1], in[2], "tanh", layout)};
    };
    auto plain = [&](const Tensors& in) {
      at::Tensor weight = layout == WeightLayout::kOutIn ? in[1].t() : in[1];
      return Tensors{at::matmul(plain_gelu(in[0], true), weight) + in[2]};
    };
    for (const std::vector<size_t>& frozen : {std::vector<size_t>{}, {0}, {1}, {2}})
      compare(ours, plain,
              {random({2, 3, 7}), layout == WeightLayout::kOutIn ? random({5, 7}) : random({7, 5}),
               random({5})},
              frozen);
  }
}

}  // namespace
}  // namespace fsdp::nn
