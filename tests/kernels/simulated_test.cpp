// The CUDA kernels behind ops.h, simulated on the CPU, against the CPU's kernels in float64 (which
// norm_test.cpp and the others check against formulas). Sizes are chosen so that every path of
// every kernel runs: vectors and single elements, rows of a warp, of a block and longer, several
// rows per block. Tensors of 2^32 elements and more are too large to simulate.
#include <torch/autograd.h>
#include <torch/nn/functional/loss.h>
#include <torch/types.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/simulated/testing.h"

namespace fsdp::kernels {
namespace {

// For all tests of this program. One thread: a reference is little work for the CPU.
const bool prepared = (guard_memory(), at::set_num_threads(1), true);

// --- normalisation ---

constexpr double kEps = 1e-5;

// One case; Options goes through the combinations.
struct NormCase {
  bool centred;
  at::ScalarType type;
  int64_t rows, dim;
  bool apart = false;  // memory isn't aligned
  bool grads = true;   // of the parameters; slow to add up for many rows
};

struct NormTensors {
  at::Tensor x, residual, weight, bias, grad, grad_sum, grad_weight, grad_bias;
  bool accumulate, want_out;
};

NormTensors tensors_of(const NormCase& c, Options& options) {
  const auto make = [&](bool wanted, at::IntArrayRef sizes, at::ScalarType type) {
    return wanted ? made_up(sizes, type, c.apart) : at::Tensor();
  };
  const auto weight_type = options.one_of(c.type, at::kFloat);
  const bool grads = c.grads && !options.rarely();
  return {.x = make(true, {c.rows, c.dim}, c.type),
          .residual = make(options.flip(), {c.rows, c.dim}, c.type),
          .weight = make(true, {c.dim}, c.type),
          .bias = make(c.centred && options.flip(), {c.dim}, c.type),
          .grad = make(true, {c.rows, c.dim}, c.type),
          .grad_sum = make(options.flip(), {c.rows, c.dim}, c.type),
          .grad_weight = make(grads, {c.dim}, weight_type),
          .grad_bias = make(grads && c.centred, {c.dim}, options.one_of(at::kBFloat16, at::kFloat)),
          .accumulate = options.flip(),
          .want_out = options.flip()};
}

// out, sum, mean, rstd, grad_x, out again, grad_weight, grad_bias
std::vector<at::Tensor> run(bool centred, const NormTensors& t) {
  const auto made = centred ? layer_norm(t.x, t.residual, t.weight, t.bias, kEps)
                            : rms_norm(t.x, t.residual, t.weight, kEps);
  const auto& x = t.residual.defined() ? made.sum : t.x;
  const auto weight = copied(t.grad_weight), bias = copied(t.grad_bias);
  const auto grads =
      centred ? layer_norm_backward(t.grad, t.grad_sum, x, made.mean, made.rstd, t.weight, t.bias,
                                    weight, bias, t.accumulate, t.want_out)
              : rms_norm_backward(t.grad, t.grad_sum, x, made.rstd, t.weight, weight, t.accumulate,
                                  t.want_out);
  return {made.out, made.sum, made.mean, made.rstd, grads.x, grads.out, weight, bias};
}

NormTensors in_double(NormTensors t) {
  if (t.residual.defined()) {  // the sum is rounded before it is normalised
    t.x = t.x + t.residual;
    t.residual = at::zeros_like(t.x, at::kDouble);
  }
  for (auto tensor : {&NormTensors::x, &NormTensors::weight, &NormTensors::bias, &NormTensors::grad,
                      &NormTensors::grad_sum, &NormTensors::grad_weight, &NormTensors::grad_bias})
    t.*tensor = exact_or_none(t.*tensor);
  return t;
}

void expect_right(const NormCase& c, Options& options) {
  SCOPED_TRACE(::testing::Message()
               << (c.centred ? "layer_norm " : "rms_norm ") << c.type << " " << c.rows << " x "
               << c.dim << " apart " << c.apart << ", options " << options.count());
  const auto t = tensors_of(c, options);
  const auto made = simulated([&] { return run(c.centred, t); });
  const auto expected = run(c.centred, in_double(t));
  // Gradients of x are multiplied by rstd and those of parameters are sums of many terms, and so
  // are their errors.
  const double rstd = c.rows > 0 ? expected[3].max().item<double>() : 1;
  const double terms = 2 * (1 + std::sqrt(static_cast<double>(c.rows)));
  const double scales[] = {1, 1, 1, 1, 2 * (1 + rstd), 1, terms, terms};
  for (size_t i = 0; i < made.size(); ++i) {
    ASSERT_EQ(made[i].defined(), expected[i].defined());
    if (!made[i].defined()) continue;
    EXPECT_TRUE(near(made[i], expected[i], scales[i])) << "result " << i;
  }
  if (t.residual.defined()) {
    EXPECT_TRUE(same_bits(made[1], t.x + t.residual));
  }
  if (t.want_out) {
    EXPECT_TRUE(same_bits(made[5], made[0]));
  }
}

TEST(SimulatedNorms, AreRightOnEveryPath) {
  Options options;
  for (bool centred : {false, true})
    for (auto type : kDtypes) {
      for (auto [rows, dim] :
           {std::pair<int64_t, int64_t>
            // rows of a warp, of up to 256 threads, of 2 and of 4 vectors per thread, longer
            {0, 16},
            {1, 8},
            {17, 256},
            {3, 264},
            {2, 2048},
            {2, 4096},
            {3, 8192},
            {1, 8200},
            {1, 32768},
            {2, 32776},
            // element by element
            {1, 1},
            {3, 3},
            {5, 77},
            {2, 1001},
            {3, 1033},
            {2, 4095},
            {1, 4097}})
        expect_right({centred, type, rows, dim, false, dim <= 2056}, options);
      for (int64_t dim : {8, 256, 1000, 2048, 4104})
        expect_right({centred, type, 3, dim, true, dim <= 2056}, options);
    }
}

TEST(SimulatedNorms, AddUpMoreRowsThanThereAreBlocks) {
  Options options;
  for (bool centred : {false, true}) {
    expect_right({centred, at::kHalf, 1070, 264}, options);
    expect_right({centred, at::kFloat, 535, 1032}, options);
    expect_right({centred, at::kFloat, 1060, 3}, options);
  }
  expect_right({false, at::kBFloat16, 8500, 8}, options);  // a warp each
  expect_right({true, at::kBFloat16, 530, 2056}, options);
  expect_right({true, at::kBFloat16, 530, 1033}, options);  // partial sums in memory
  expect_right({false, at::kHalf, 529, 8200}, options);
}

// --- rotary positions ---

struct Angles {
  at::Tensor cos, sin;
};

Angles angles(at::IntArrayRef sizes, at::ScalarType type, bool apart) {
  auto half = sizes.vec();
  half.back() /= 2;
  const auto one = torch::randn(half, at::kDouble) * 4;
  const auto both = at::cat({one, one}, -1);
  const auto placed = [&](const at::Tensor& t) { return apart ? unaligned(t) : t; };
  return {placed(both.cos().to(type)), placed(both.sin().to(type))};
}

struct RopeCase {
  int64_t batch, tokens, heads, kv_heads, head_dim;
  bool apart = false;
};

// The rows are wider than the heads that are rotated.
void expect_turned(const RopeCase& c, at::ScalarType type, at::ScalarType angle_type, bool of_each,
                   bool inverse) {
  const auto sizes = of_each ? std::vector<int64_t>{c.batch, c.tokens, c.head_dim}
                             : std::vector<int64_t>{c.tokens, c.head_dim};
  const Angles a = angles(sizes, angle_type, c.apart);
  const int64_t width = (c.heads + 2 * c.kv_heads) * c.head_dim;
  const auto rows = made_up({c.batch, c.tokens, width + (c.apart ? 3 : 16)}, type, c.apart);
  const auto turn = [&](at::Tensor all, const Angles& by) {
    rope_(all.narrow(2, 0, width), by.cos, by.sin, c.heads, inverse);
    return std::vector<at::Tensor>{all};
  };
  const auto made = simulated([&] { return turn(copied(rows), a); });
  const auto expected = turn(exact(rows).detach(), {exact(a.cos).detach(), exact(a.sin).detach()});
  EXPECT_TRUE(near(made[0], expected[0]));
  const int64_t turned = c.heads * c.head_dim;
  EXPECT_TRUE(same_bits(made[0].narrow(2, turned, rows.size(2) - turned),
                        rows.narrow(2, turned, rows.size(2) - turned)));
}

void expect_packed(const RopeCase& c, at::ScalarType type, at::ScalarType angle_type, bool of_each,
                   bool transposed) {
  const auto sizes = of_each ? std::vector<int64_t>{c.batch, c.tokens, c.head_dim}
                             : std::vector<int64_t>{c.tokens, c.head_dim};
  const Angles a = angles(sizes, angle_type, c.apart);
  const auto heads = [&](int64_t count) {
    return transposed
               ? made_up({c.batch, c.tokens, count, c.head_dim}, type, c.apart).transpose(1, 2)
               : made_up({c.batch, count, c.tokens, c.head_dim}, type, c.apart);
  };
  const auto q = heads(c.heads), k = heads(c.kv_heads), v = heads(c.kv_heads);
  const auto made =
      simulated([&] { return std::vector<at::Tensor>{rope_pack(q, k, v, a.cos, a.sin)}; });
  const auto expected = rope_pack(exact(q).detach(), exact(k).detach(), exact(v).detach(),
                                  exact(a.cos).detach(), exact(a.sin).detach());
  EXPECT_TRUE(near(made[0], expected));
}

TEST(SimulatedRope, TurnsAndPacksEveryLayout) {
  Options options;
  for (auto type : kDtypes)
    for (auto angle_type : {type, at::kFloat})
      for (const RopeCase& c : {RopeCase{1, 1, 1, 1, 2},
                                {2, 3, 3, 1, 10},
                                {2, 7, 4, 4, 64},
                                {3, 5, 6, 2, 128},
                                {1, 9, 71, 1, 80},
                                {2, 5, 15, 5, 64},
                                {0, 4, 2, 1, 16},
                                {1, 0, 2, 1, 16},
                                {2, 3, 3, 1, 6, true},
                                {2, 3, 14, 2, 64, true}}) {
        SCOPED_TRACE(::testing::Message() << type << " by " << angle_type << " " << c.batch << " "
                                          << c.tokens << " " << c.heads << " " << c.kv_heads << " "
                                          << c.head_dim << ", options " << options.count());
        expect_turned(c, type, angle_type, options.flip(), options.flip());
        expect_packed(c, type, angle_type, options.flip(), options.flip());
      }
}

// Enough work for a thread to take several heads of a token.
TEST(SimulatedRope, TurnsAndPacksManyTokens) {
  for (const RopeCase& c : {RopeCase{1, 301, 15, 2, 128, true}, {2, 1100, 32, 2, 64}}) {
    SCOPED_TRACE(c.heads);
    expect_turned(c, at::kBFloat16, at::kFloat, true, false);
    expect_packed(c, at::kBFloat16, at::kBFloat16, false, true);
  }
}

// --- activations ---

TEST(SimulatedActivations, AreRightForwardAndBackward) {
  for (auto type : kDtypes)
    for (bool apart : {false, true})
      for (auto [rows, width] :
           {std::pair<int64_t, int64_t>{0, 8}, {1, 1}, {3, 3}, {7, 77}, {3, 1000}, {1, 4097}}) {
        SCOPED_TRACE(::testing::Message()
                     << type << " " << rows << " x " << width << " apart " << apart);
        const auto gate_up = made_up({rows, 2 * width}, type, apart) * 4;
        const auto x = made_up({rows, width}, type, apart), grad = made_up({rows, width}, type);
        const auto run = [&](const auto& dtype, bool want_out) {
          std::vector<at::Tensor> list{swiglu(dtype(gate_up)), gelu(dtype(x), false),
                                       gelu(dtype(x), true)};
          for (const auto& [d, out] : {swiglu_backward(dtype(grad), dtype(gate_up), want_out),
                                       gelu_backward(dtype(grad), dtype(x), false, want_out),
                                       gelu_backward(dtype(grad), dtype(x), true, want_out)}) {
            list.push_back(d);
            list.push_back(out);
          }
          return list;
        };
        const auto same = [&](const at::Tensor& t) { return apart ? unaligned(t) : t; };
        const auto made = simulated([&] { return run(same, true); });
        const auto expected = run([](const at::Tensor& t) { return exact(t).detach(); }, true);
        for (size_t i = 0; i < made.size(); ++i)
          EXPECT_TRUE(near(made[i], expected[i])) << "result " << i;
        for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(same_bits(made[4 + 2 * i], made[i]));
        const auto without = simulated([&] { return run(same, false); });
        for (size_t i = 0; i < 3; ++i) {
          EXPECT_TRUE(same_bits(without[3 + 2 * i], made[3 + 2 * i]));
          EXPECT_EQ(without[4 + 2 * i].numel(), 0);
        }
      }
}

TEST(SimulatedActivations, StayFiniteWhereExponentialsDoNot) {
  const auto gate = torch::tensor({-1e4, 1e4, -200.0, 200.0, 0.0, -88.0, 88.0, -100.0});
  for (auto type : {at::kFloat, at::kBFloat16}) {
    const auto gate_up = at::cat({gate, at::ones({8})}).to(type).view({1, 16});
    const auto grad = at::ones({1, 8}, type);
    const auto made = simulated([&] {
      return std::vector<at::Tensor>{swiglu(gate_up),
                                     std::get<0>(swiglu_backward(grad, gate_up, false))};
    });
    const auto wide = exact(gate_up).detach();
    EXPECT_TRUE(near(made[0], swiglu(wide)));
    EXPECT_TRUE(near(made[1], std::get<0>(swiglu_backward(exact(grad).detach(), wide, false))));
  }
}

TEST(SimulatedScaleInto, ConvertsBetweenAllDtypes) {
  Options options;
  for (auto from : kDtypes)
    for (auto to : kDtypes)
      for (bool accumulate : {false, true})
        for (int64_t numel : {0, 1, 7, 77, 4097}) {
          const bool apart = options.flip();
          const auto target = made_up({numel}, to, apart), source = made_up({numel}, from, apart);
          const auto scale = options.flip() ? torch::full({1}, 0.37f) : at::Tensor();
          const auto made = simulated([&] {
            const auto result = copied(target);
            scale_into(result, source, scale, accumulate);
            return std::vector<at::Tensor>{result};
          });
          auto expected = exact(source).detach();
          if (scale.defined()) expected = expected * exact(scale).detach();
          if (accumulate) expected = expected + exact(target).detach();
          EXPECT_TRUE(near(made[0], expected)) << from << " to " << to << " " << numel;
        }
}

// --- loss and embedding ---

struct Losses {
  at::Tensor targets, invalid;  // [rows]
};

// Some targets are ignored, and some are outside the vocabulary.
Losses some_targets(int64_t rows, int64_t vocab, int64_t ignored) {
  auto targets = torch::randint(vocab, {rows}, at::kLong);
  for (int64_t i = 0; i < rows; ++i) {
    if (i % 4 == 1) targets[i] = ignored;
    if (i % 8 == 3) targets[i] = vocab + i;
    if (i % 8 == 7) targets[i] = -1;
  }
  return {targets, (targets != ignored).logical_and((targets < 0).logical_or(targets >= vocab))};
}

// Loss and gradient are NaN where a target is invalid, and right everywhere else.
void expect_near_but_nan(const at::Tensor& actual, const at::Tensor& expected,
                         const at::Tensor& invalid) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  const auto where = actual.dim() == 2 ? invalid.unsqueeze(1).expand_as(actual) : invalid;
  EXPECT_TRUE(at::equal(actual.isnan(), where));
  EXPECT_TRUE(near(actual.masked_fill(where, 0), expected.masked_fill(where, 0)));
}

TEST(SimulatedCrossEntropy, IsRightForRowsOfAnyLengthAndPlace) {
  constexpr int64_t kIgnored = -100;
  for (auto type : kDtypes)
    for (bool apart : {false, true})
      for (auto [rows, vocab] : {std::pair<int64_t, int64_t>{0, 5},
                                 {1, 1},
                                 {9, 3},
                                 {12, 77},
                                 {9, 1000},
                                 {8, 4097},
                                 {4, 16385}}) {
        SCOPED_TRACE(::testing::Message()
                     << type << " " << rows << " x " << vocab << " apart " << apart);
        const int64_t width = vocab + (apart ? 3 : 8);  // slices of wider rows
        const auto wide = made_up({rows, width}, type, apart) * 5;
        const auto all = apart ? unaligned(wide) : wide;
        const auto [targets, invalid] = some_targets(rows, vocab, kIgnored);
        const auto grad = torch::randn({rows}), scale = torch::full({1}, 0.7f);
        const auto made = simulated([&, targets = targets] {
          const auto logits = all.narrow(1, 0, vocab);
          const auto [losses, log_sum] = cross_entropy(logits, targets, kIgnored);
          const auto place = apart ? unaligned(all) : copied(all);
          const auto again = cross_entropy_(place.narrow(1, 0, vocab), targets, scale, kIgnored);
          return std::vector<at::Tensor>{
              losses, log_sum, again, place,
              cross_entropy_backward(grad, logits, targets, log_sum, kIgnored)};
        });
        const auto x = exact(all).detach().narrow(1, 0, vocab).clone().requires_grad_();
        const auto valid = targets.masked_fill(invalid, kIgnored);
        const auto expected =
            torch::nn::functional::cross_entropy(x, valid,
                                                 torch::nn::functional::CrossEntropyFuncOptions()
                                                     .reduction(torch::kNone)
                                                     .ignore_index(kIgnored));
        expect_near_but_nan(made[0], expected.detach(), invalid);
        EXPECT_TRUE(near(made[1], x.detach().logsumexp(1)));
        expect_near_but_nan(made[2], expected.detach(), invalid);
        const auto gradient = [&](const at::Tensor& by) {
          return torch::autograd::grad({expected}, {x}, {by}, /*retain_graph=*/true)[0];
        };
        expect_near_but_nan(made[3].narrow(1, 0, vocab),
                            gradient(exact(scale).detach().expand({rows})), invalid);
        EXPECT_TRUE(same_bits(made[3].narrow(1, vocab, width - vocab),
                              all.narrow(1, vocab, width - vocab)));
        expect_near_but_nan(made[4], gradient(exact(grad).detach()), invalid);
      }
}

TEST(SimulatedCrossEntropy, BearsHugeAndMissingLogits) {
  const float none = -std::numeric_limits<float>::infinity();
  auto logits =
      torch::tensor({1e4f, -1e4f, 0.0f, none, none, 30.0f, -3e38f, 1e6f, 1.0f, none, none, 2.0f})
          .view({3, 4});
  logits = at::cat({logits, at::full({3, 30}, none)}, 1).contiguous();
  const auto targets = torch::tensor({0, 1, 3}, at::kLong);
  const auto made = simulated([&] {
    const auto [losses, log_sum] = cross_entropy(logits, targets, -100);
    return std::vector<at::Tensor>{losses, log_sum};
  });
  const auto expected = torch::log_softmax(logits.to(at::kDouble), 1);
  EXPECT_TRUE(near(made[0][0], -expected[0][0]));
  EXPECT_TRUE(near(made[0][1], -expected[1][1]));
  EXPECT_TRUE(near(made[0][2], -expected[2][3]));
}

struct EmbeddingCase {
  int64_t rows, dim, vocab;
  int64_t often = 0;  // at least every other row has this id
  bool apart = false;
};

void expect_right(const EmbeddingCase& c, at::ScalarType type, Options& options) {
  const auto weight_type = options.one_of(type, at::kFloat);
  const bool accumulate = options.flip();
  const int64_t padding = options.flip() ? c.vocab - 1 : -1;
  SCOPED_TRACE(::testing::Message() << type << " " << c.rows << " x " << c.dim << ", " << c.vocab
                                    << " ids, options " << options.count());
  const auto grad = made_up({c.rows, c.dim}, type, c.apart);
  auto ids = torch::randint(c.vocab, {c.rows}, at::kLong);
  if (c.often > 0)
    ids = at::where(torch::rand({c.rows}) < 0.8, torch::full({c.rows}, c.often, at::kLong), ids);
  const auto before = made_up({c.vocab, c.dim}, weight_type, c.apart);
  const auto run = [&](const at::Tensor& g, const at::Tensor& weight) {
    embedding_backward(g, ids, weight, padding, accumulate);
    return std::vector<at::Tensor>{weight};
  };
  const auto made =
      simulated([&] { return run(grad, c.apart ? unaligned(before) : copied(before)); });
  const auto expected = run(exact(grad).detach(), exact(before).detach());
  const double terms = 1 + std::sqrt(static_cast<double>(c.rows)) * (c.often > 0 ? 4 : 1);
  EXPECT_TRUE(near(made[0], expected[0], terms));
  if (padding >= 0 && accumulate) {
    EXPECT_TRUE(same_bits(made[0][padding], before[padding]));
  }
}

TEST(SimulatedEmbedding, AddsRowsAsTheyComeAndSorted) {
  Options options;
  for (auto type : kDtypes) {
    for (const EmbeddingCase& c : {EmbeddingCase{0, 8, 5},
                                   {1, 1, 1},
                                   {3, 3, 2},
                                   {77, 77, 10},
                                   {50, 264, 1000},
                                   {20, 2056, 7},
                                   {1024, 8, 9, 3},
                                   {77, 8, 10, 0, true},
                                   {1025, 8, 9},
                                   {1025, 1, 2000},
                                   {2000, 16, 50, 7},
                                   {1100, 2056, 300},
                                   {3000, 3, 40, 39},
                                   {1500, 264, 9, 2, true}})
      expect_right(c, type, options);
  }
  expect_right(EmbeddingCase{70000, 1, 20, 5}, at::kFloat, options);  // chunks of more than 32 rows
  expect_right(EmbeddingCase{70000, 8, 3, 1}, at::kBFloat16, options);
}

}  // namespace
}  // namespace fsdp::kernels
