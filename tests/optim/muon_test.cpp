// Muon on sharded models, on every rank beside the same formulas on whole matrices, and against
// itself: recorded, offloaded, resumed.
#include <ATen/ATen.h>
#include <torch/nn/modules/conv.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <cmath>
#include <limits>

#include "base/seams.h"
#include "checkpoint/trained.h"
#include "fsdp/muon.h"
#include "fsdp/state_dict.h"
#include "optim/graphed_trial.h"
#include "optim/matrix_plan.h"
#include "optim/newton_schulz.h"

namespace fsdp::testing {
namespace {

constexpr double kRate = 2e-2, kDecay = 0.1;

// --- the formulas, for one matrix ---

at::Tensor orthogonal(const at::Tensor& matrix) {
  const bool tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = tall ? matrix.t() : matrix;
  x = x / x.norm().clamp_min(1e-7);
  for (int i = 0; i < 5; ++i) {
    const at::Tensor a = x.mm(x.t());
    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a.mm(a)).mm(x);
  }
  x = x * (0.2 * std::sqrt(static_cast<double>(std::max(matrix.size(0), matrix.size(1)))));
  return tall ? x.t() : x;
}

// What `cut` makes of a parameter: its matrices, as views.
using Matrices = std::vector<at::Tensor>;
using CutOf = std::function<Matrices(const std::string& name, const at::Tensor& parameter)>;

struct PlainMuon {
  void step(const NamedTensors& parameters, const CutOf& cut) {
    at::NoGradGuard no_grad;
    for (const auto& [name, parameter] : parameters) {
      at::Tensor& momentum = momenta[name];
      if (!momentum.defined()) momentum = at::zeros_like(parameter);
      momentum.lerp_(parameter.grad(), 0.05);
      const at::Tensor direction = parameter.grad().lerp(momentum, 0.95);
      parameter.mul_(1 - kRate * kDecay);
      const Matrices from = cut(name, direction), to = cut(name, parameter);
      for (size_t i = 0; i < from.size(); ++i) to[i].sub_(kRate * orthogonal(from[i]));
    }
  }
  std::map<std::string, at::Tensor> momenta;
};

// --- a model with matrices of every kind ---

struct ShapesImpl : nn::Module {
  ShapesImpl() {
    at::NoGradGuard no_grad;
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    turned.set_data(at::randn({12, 20}).t());
  }
  at::Tensor loss(int step, int rank) const {
    at::Tensor sum = at::zeros({}, at::TensorOptions(wide.device()));
    int which = 0;
    for (const auto& p : parameters()) {
      const auto x = random_normal(step, rank, ++which, p.sizes()).to(p.device());
      sum = sum + (p - x).square().sum() + (p * x).sum();
    }
    return sum;
  }
  at::Tensor wide = register_parameter("wide", at::randn({9, 30}));
  at::Tensor tall = register_parameter("tall", at::randn({40, 11}));
  at::Tensor turned = register_parameter("turned", at::randn({20, 12}));
  at::Tensor bias = register_parameter("bias", at::randn({17}));
  at::Tensor fused = register_parameter("fused", at::randn({24, 14}));      // 8 + 12 + 4 rows
  at::Tensor columns = register_parameter("columns", at::randn({10, 18}));  // three of 6
  at::Tensor experts = register_parameter("experts", at::randn({5, 8, 6}));
  nn::Conv2d conv = register_module("conv", nn::Conv2d(3, 8, 3));
  nn::Linear lm_head = register_module("lm_head", nn::Linear(6, 13));
};
TORCH_MODULE(Shapes);

MatrixSplit split_of(const std::string& name, const at::Tensor&) {
  if (name == "fused") return {0, {8, 12, 4}};
  if (name == "columns") return {1, {6, 6, 6}};
  return {};
}

Matrices cut_of(const std::string& name, const at::Tensor& p) {
  if (name == "experts") return p.unbind(0);
  if (name == "conv.weight") return {p.view_as(p).permute({0, 2, 3, 1}).view({8, 27})};
  const MatrixSplit split = split_of(name, p);
  return split.sizes.empty() ? Matrices{p} : p.split_with_sizes(split.sizes, split.dim);
}

MuonOptions muon_options() {
  return {.lr = kRate,
          .weight_decay = kDecay,
          .matrices = {.split = split_of},
          .adamw = {.eps = 1e-3, .groups = {no_decay()}}};
}

// Trains Shapes and the formulas side by side; the largest difference.
double apart_after(int steps, ShardOptions options) {
  torch::manual_seed(7);
  Shapes model, plain;
  {
    at::NoGradGuard no_grad;
    for (const auto& item : plain->named_parameters())
      item.value().copy_(model->named_parameters()[item.key()]);
  }
  plain->to(test_device());
  options.device = test_device();
  const Sharded sharded = fully_shard(model, options);
  Muon optimizer(sharded, muon_options());
  PlainMuon reference;
  NamedTensors matrices;
  std::vector<at::Tensor> biases, others;
  for (const auto& item : plain->named_parameters()) {
    if (item.value().dim() < 2)
      biases.push_back(item.value());
    else if (item.key() == "lm_head.weight")
      others.push_back(item.value());
    else
      matrices.emplace_back(item.key(), item.value());
  }
  const auto adamw = [](double decay) {
    return torch::optim::AdamWOptions(kRate).betas({0.9, 0.95}).eps(1e-3).weight_decay(decay);
  };
  torch::optim::AdamW first(biases, adamw(0)), second(others, adamw(kDecay));
  for (int step = 0; step < steps; ++step) {
    model->loss(step, rank()).backward();
    for (int r = 0; r < world_size(); ++r) (plain->loss(step, r) / world_size()).backward();
    sharded.clip_grad_norm_(1e9);
    optimizer.step();
    optimizer.zero_grad();
    reference.step(matrices, cut_of);
    first.step();
    second.step();
    plain->zero_grad();
  }
  double most = 0;
  for (const auto& item : plain->named_parameters()) {
    const at::Tensor full = sharded.full_tensor(item.key());
    most = std::max(most, (full - item.value().detach()).abs().max().item<double>());
  }
  return most;
}

std::vector<ShardOptions> ways() {
  std::vector<ShardOptions> all;
  for (const auto strategy :
       {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP, ShardingStrategy::NO_SHARD})
    all.push_back({.strategy = strategy});
  if (world_size() % 2 == 0)
    all.push_back({.strategy = ShardingStrategy::HYBRID_SHARD, .mesh = hybrid_mesh()});
  for (const Cut cut : {Cut::ROW, Cut::ELEMENT, Cut::TENSOR}) all.push_back({.cut = cut});
  all.push_back({.wrap = wrap::names({"conv", "lm_head"}), .share_host_memory = false});
  return all;
}

TEST(Muons, FollowTheFormulasHoweverAModelIsSharded) {
  for (size_t i = 0; i < ways().size(); ++i)
    EXPECT_LE(apart_after(6, ways()[i]), 2e-5) << "way " << i;
}

TEST(Muons, AreTheSameInBucketsOfOneFlat) {
  const WithSeams small({.matrix_bucket = 1});
  EXPECT_LE(apart_after(4, {.wrap = wrap::names({"conv"})}), 2e-5);
}

// --- what travels ---

int64_t sent_by(const ShardOptions& given, at::ScalarType type) {
  torch::manual_seed(7);
  Shapes model;
  ShardOptions options = given;
  options.device = test_device();
  if (type != at::kFloat) options.mixed_precision.param_dtype = type;
  const Sharded sharded = fully_shard(model, options);
  Muon optimizer(sharded, muon_options());
  model->loss(0, rank()).backward();
  sharded.reset_traffic();
  optimizer.step();
  return sharded.traffic().all_to_all;
}

TEST(Muons, SendNothingForMatricesThatOneRankHas) {
  EXPECT_EQ(sent_by({.cut = Cut::TENSOR}, at::kFloat), 0);
  const auto all = [](int64_t mine) { return sum_over_ranks(static_cast<double>(mine)); };
  const double wide = all(sent_by({.cut = Cut::ELEMENT}, at::kFloat));
  const double narrow = all(sent_by({.cut = Cut::ELEMENT}, at::kBFloat16));
  EXPECT_EQ(wide > 0, world_size() > 1);
  EXPECT_EQ(narrow * 2, wide);
}

TEST(Muons, AreComputedByOneOfTheReplicas) {
  const int64_t sent = sent_by({.strategy = ShardingStrategy::NO_SHARD}, at::kFloat);
  EXPECT_EQ(sent > 0, world_size() > 1);
  const int64_t matrices = 9 * 30 + 40 * 11 + 20 * 12 + 24 * 14 + 10 * 18 + 5 * 8 * 6 + 8 * 27;
  EXPECT_EQ(sum_over_ranks(static_cast<double>(sent)),
            4.0 * static_cast<double>(matrices * (world_size() - 1)));
}

TEST(Muons, GiveMatricesToOwnersWithLittleToDo) {
  using optim::Holders;
  // A matrix within a shard stays. The others, largest first, go where there is least to do.
  const std::vector<Holders> matrices = {{0, 0, 0, 10}, {0, 1, 0, 4}, {0, 1, 1, 5}, {1, 2, 1, 1}};
  EXPECT_EQ(optim::owners_of(matrices, 3), (std::vector<int>{0, 2, 1, 2}));
  const std::vector<Holders> equal(8, Holders{0, 3, 2, 1.0});
  std::vector<int> count(4);
  for (const int owner : optim::owners_of(equal, 4)) ++count[static_cast<size_t>(owner)];
  EXPECT_EQ(count, (std::vector<int>{2, 2, 2, 2}));
  EXPECT_EQ(optim::owners_of(equal, 4).front(), 2);  // it holds most
}

TEST(Muons, KeepOneStateOfMatricesAndTwoOfTheOthers) {
  torch::manual_seed(7);
  Shapes model;
  int64_t matrices = 0, others = 0;
  for (const auto& item : model->named_parameters())
    (item.value().dim() < 2 || item.key() == "lm_head.weight" ? others : matrices) +=
        item.value().numel();
  const Sharded sharded =
      fully_shard(model, {.strategy = ShardingStrategy::NO_SHARD, .device = test_device()});
  Muon optimizer(sharded, muon_options());
  model->loss(0, rank()).backward();
  optimizer.step();
  const int64_t least = 4 * (matrices + 2 * others);
  EXPECT_GE(optimizer.state_bytes(), least);
  EXPECT_LE(optimizer.state_bytes(), least + 4 * 64 * 20);  // alignment
  ASSERT_EQ(optimizer.groups().size(), 3u);
  EXPECT_EQ(optimizer.groups()[0].parameters.size(), 7u);
  EXPECT_EQ(optimizer.groups()[1].parameters,
            (std::vector<std::string>{"bias", "conv.bias", "lm_head.bias"}));
  EXPECT_EQ(optimizer.groups()[2].parameters, std::vector<std::string>{"lm_head.weight"});
  EXPECT_TRUE(optimizer.has_matrices(0));
  EXPECT_FALSE(optimizer.has_matrices(1));
}

TEST(Muons, PolarExpressComesNearerToOrthogonal) {
  torch::manual_seed(3);
  const at::Tensor matrices = at::randn({2, 24, 40});
  const auto off = [&](NewtonSchulz kind, int steps) {
    const auto x = optim::orthogonalized(matrices, optim::quintics(kind, steps), 1e-7, 1);
    return (at::linalg_svdvals(x) - 1).abs().max().item<double>();
  };
  EXPECT_LT(off(NewtonSchulz::QUINTIC, 5), 0.4);
  EXPECT_LT(off(NewtonSchulz::POLAR_EXPRESS, 5), 0.2);
  EXPECT_LT(off(NewtonSchulz::POLAR_EXPRESS, 8), 1e-3);
}

TEST(Muons, LargeProductsByHalvesAreTheSame) {
  torch::manual_seed(3);
  for (const bool tall : {false, true}) {
    const at::Tensor wide = at::randn({1, 1035, 1100}, at::kDouble);
    const at::Tensor matrix = tall ? wide.mT().contiguous() : wide;
    const auto steps = optim::quintics(NewtonSchulz::QUINTIC, 1);
    const auto [a, b, c] = steps[0];
    const at::Tensor x = wide[0] / wide.norm(), gram = x.mm(x.t());
    const at::Tensor expected = a * x + (b * gram + c * gram.mm(gram)).mm(x);
    const at::Tensor result = optim::orthogonalized(matrix, steps, 1e-7, 1)[0];
    EXPECT_LE(((tall ? result.t() : result) - expected).abs().max().item<double>(), 1e-12);
  }
}

TEST(Muons, RefuseWhatCannotBe) {
  torch::manual_seed(7);
  Shapes model;
  const Sharded sharded =
      fully_shard(model, {.device = test_device(), .offload = {.optimizer = true}});
  expect_error([&] { Muon(sharded, {.momentum = 1}); }, {"momentum = 1"});
  expect_error([&] { Muon(sharded, {.steps = 0}); }, {"steps = 0"});
  expect_error([&] { Muon(sharded, {.adamw = {.betas = {0.9, 2.0}}}); }, {"betas.second"});
  expect_error([&] { Muon(sharded, {.matrices = {.groups = {{.norms = true}}}}); }, {"norms"});
  const auto wrong = [](const std::string&, const at::Tensor&) { return MatrixSplit{0, {1}}; };
  expect_error([&] { Muon(sharded, {.matrices = {.split = wrong}}); }, {"\"wide\"", "cut"});
  Muon optimizer(sharded, {});
  expect_error([&] { optimizer.step_in_backward(); }, {"whole matrices", "HINT"});
}

// --- against itself ---

std::unique_ptr<Optimizer> small_muon(const Sharded& sharded) {
  return std::make_unique<Muon>(
      sharded,
      MuonOptions{.lr = 1e-2, .weight_decay = 0.1, .adamw = {.eps = 1e-3, .groups = {no_decay()}}});
}

using MuonGraphs = GraphedSteps;

TEST_F(MuonGraphs, GiveTheNumbersOfStepsByHand) {
  Plan plan{.model = "transformer", .step = {.clip = 0.5}, .micro_batches = 2};
  plan.optimizer = small_muon;
  plan.set = [](Optimizer& optimizer, int step) { optimizer.set_lr(1e-2 / (1 + step)); };
  const Outcome recorded = expect_same_every_way(plan);
  EXPECT_EQ(recorded.traffic.all_to_all > 0, world_size() > 1);
  EXPECT_EQ(recorded.traffic.all_to_all, eager(plan).traffic.all_to_all);
  for (int64_t updates : recorded.updates) EXPECT_EQ(updates, plan.steps);
  plan.precision = bf16_precision();
  expect_same(graphed(plan), eager(plan));
}

TEST_F(MuonGraphs, SkipWhatIsNotFinite) {
  Plan plan{.model = "mlp", .step = {.clip = 1.0, .warmup = 2}};
  plan.optimizer = small_muon;
  plan.change = [](Inputs& inputs, int step) {
    if (rank() == world_size() - 1 && (step == 1 || step == 6))
      inputs[0][0][0] = std::numeric_limits<float>::quiet_NaN();
  };
  const Outcome recorded = graphed(plan);
  EXPECT_EQ(recorded.skipped, (std::vector<int>{0, 1, 0, 0, 0, 0, 1, 0, 0, 0}));
  for (int64_t updates : recorded.updates) EXPECT_EQ(updates, 8);
  for (const auto& [name, value] : recorded.parameters)
    EXPECT_TRUE(value.isfinite().all().item<bool>()) << name;
  expect_same(recorded, eager(plan));
}

NamedTensors offloaded(const Offload& offload, const MixedPrecision& precision) {
  const ModelCase& model = model_case("transformer");
  Built built = build_seeded(model);
  const Sharded sharded = fully_shard(built.module, {.wrap = model.wrap,
                                                     .mixed_precision = precision,
                                                     .device = test_device(),
                                                     .offload = offload});
  const auto optimizer = small_muon(sharded);
  for (int step = 0; step < 4; ++step) {
    built.loss(moved(model.batch(step, rank()), test_device())).backward();
    sharded.clip_grad_norm_(0.5);
    optimizer->step();
    optimizer->zero_grad();
  }
  NamedTensors values;
  const StateDict full = sharded.full_state_dict();
  for (const auto& [name, tensor] : built.parameters)
    values.emplace_back(name, full.at(name).full());
  return values;
}

TEST(Muons, LearnTheSameOffloaded) {
  SharedFolder folder;
  for (const MixedPrecision& precision : {MixedPrecision(), bf16_precision()}) {
    const auto expected = offloaded({}, precision);
    for (const Offload& offload :
         {Offload{.optimizer = true}, Offload{.parameters = true, .gradients = true},
          Offload{.optimizer = true, .fraction = 0.5},
          Offload{.optimizer = true, .directory = folder.path()}})
      expect_same_tensors(offloaded(offload, precision), expected, on_gpu() ? 1e-2 : 0);
  }
}

TEST(Muons, FrozenMatricesAreLeftAloneUntilTheyAreNot) {
  torch::manual_seed(7);
  Shapes model;
  model->wide.set_requires_grad(false);
  const Sharded sharded = fully_shard(model, {.device = test_device()});
  Muon optimizer(sharded, muon_options());
  const auto before = sharded.full_tensor("wide"), other = sharded.full_tensor("tall");
  const auto train = [&](int step) {
    model->loss(step, rank()).backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  train(0);
  EXPECT_TRUE(at::equal(sharded.full_tensor("wide"), before));
  EXPECT_FALSE(at::equal(sharded.full_tensor("tall"), other));
  model->wide.set_requires_grad(true);
  train(1);
  EXPECT_FALSE(at::equal(sharded.full_tensor("wide"), before));
}

TEST(Muons, StateDictsAndCheckpointsGoOnWithTheSameBits) {
  for (const bool files : {false, true})
    for (const bool full : {false, true}) {
      if (files && full) continue;
      SharedFolder folder;
      auto one = make_trained("transformer", {}, Rule::kMuon),
           two = make_trained("transformer", {}, Rule::kMuon, 8);
      one.train(3);
      two.train(1);
      if (files) {
        checkpoint::save(folder / "a", one.sharded, one.optimizer.get());
        checkpoint::load(folder / "a", two.sharded, two.optimizer.get());
      } else {
        const auto state = checkpoint::state_dict(
            one.sharded, one.optimizer.get(),
            {.type = full ? StateDictType::FULL_STATE_DICT : StateDictType::SHARDED_STATE_DICT,
             .rank0_only = false});
        EXPECT_TRUE(state.contains("optim.state.blocks.0.up.weight.momentum_buffer"));
        EXPECT_TRUE(state.contains("optim.state.embedding.weight.exp_avg_sq"));
        EXPECT_FALSE(state.contains("optim.state.blocks.0.up.weight.exp_avg"));
        checkpoint::load_state_dict(state, two.sharded, two.optimizer.get());
      }
      two.steps = one.steps;
      expect_equal(snapshot(two), snapshot(one));
      one.train(2);
      two.train(2);
      expect_equal(snapshot(two), snapshot(one));
    }
}

// --- the C++ side of muon.py ---

struct TwinImpl : nn::Module {
  TwinImpl() {
    for (const auto& [name, rows, cols] : std::vector<std::tuple<std::string, int64_t, int64_t>>{
             {"square", 24, 24}, {"wide", 16, 40}, {"tall", 48, 12}})
      register_parameter(name, at::randn({rows, cols}));
    register_parameter("bias", at::randn({10}));
    register_module("lm_head", nn::Linear(nn::LinearOptions(8, 6).bias(false)));
  }
  at::Tensor forward(int step) {
    at::Tensor sum = at::zeros({});
    for (const auto& p : parameters()) sum = sum + ((p - 0.1 * step).square() * p).sum();
    return sum;
  }
};
TORCH_MODULE(Twin);

std::filesystem::path muon_folder() {
  const char* folder = std::getenv("FSDP_TEST_FOLDER");
  return folder ? folder : "";
}

constexpr int kBefore = 12, kAfter = 20;

void twin(const std::string& from, int first, int last, const std::string& to) {
  if (muon_folder().empty()) GTEST_SKIP() << "muon.py sets FSDP_TEST_FOLDER";
  torch::manual_seed(from.empty() ? 7 : 8);
  Twin model;
  Trained trained{};
  trained.built = built(model.ptr(), [](const Batch&) { return at::Tensor(); });
  trained.sharded = fully_shard(model, {.device = test_device()});
  trained.optimizer = std::make_unique<Muon>(
      trained.sharded,
      MuonOptions{.lr = 0.01,
                  .weight_decay = 0.1,
                  .adamw = {.lr = 0.02, .betas = {0.9, 0.95}, .eps = 1e-6, .weight_decay = 0.2}});
  if (from.empty()) {
    const auto start = snapshot(trained);
    if (rank() == 0) write_snapshot(muon_folder() / "start", start);
  } else {
    checkpoint::load(muon_folder() / from, trained.sharded, trained.optimizer.get());
  }
  for (int step = first; step < last; ++step) {
    model->forward(step).backward();
    trained.optimizer->step();
    trained.optimizer->zero_grad();
  }
  checkpoint::save(muon_folder() / to, trained.sharded, trained.optimizer.get());
  const auto whole = snapshot(trained);
  if (rank() == 0) write_snapshot(muon_folder() / (to + ".whole"), whole);
}

TEST(MuonTwin, Begins) {
  twin("", 0, kBefore, "begun");
}
TEST(MuonTwin, Resumes) {
  twin("begun", kBefore, kAfter, "ended");
}
TEST(MuonTwin, ResumesWhatTorchBegan) {
  twin("torch", kBefore, kAfter, "after_torch");
}

}  // namespace
}  // namespace fsdp::testing
