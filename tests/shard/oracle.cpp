#include "shard/oracle.h"

#include <ATen/ATen.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "shard/engine.h"
#include "shard/model.h"

namespace fsdp::testing {
namespace {

at::Tensor in_double(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU, at::kDouble);
}

double norm_of(const at::Tensor& tensor) {
  return tensor.norm().item<double>();
}

NamedTensors clones(const NamedTensors& tensors) {
  NamedTensors copies;
  for (const auto& [name, tensor] : tensors) copies.emplace_back(name, tensor.detach().clone());
  return copies;
}

void copy(const NamedTensors& from, const NamedTensors& to) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < from.size(); ++i) to[i].second.copy_(from[i].second);
}

// A BatchNorm's parameters and buffers stay in float32: LibTorch has no kernel for less.
bool is_of_batch_norm(const std::string& parameter, const NamedTensors& buffers) {
  std::string owner = parameter.substr(0, parameter.rfind('.') + 1);
  return std::any_of(buffers.begin(), buffers.end(),
                     [&](const auto& buffer) { return buffer.first == owner + "running_mean"; });
}

// Gives a rank the same random numbers in the sharded model and in the oracle.
void seed_work(int run, int rank) {
  torch::manual_seed(1000 * run + rank);
}

}  // namespace

torch::optim::SGDOptions sgd_options(const ModelCase& model) {
  return torch::optim::SGDOptions(kLearningRate)
      .momentum(model.momentum)
      .weight_decay(model.weight_decay);
}

Built build_seeded(const ModelCase& model, uint64_t seed) {
  torch::manual_seed(seed);
  return model.build();
}

Built build_reference(const ModelCase& model, const MixedPrecision& precision, at::Device device) {
  torch::manual_seed(kSeed);
  bool casting = precision.param_dtype && model.build_casting;
  auto plain = casting ? model.build_casting() : model.build();
  if (device.type() != at::kCPU) plain.module->to(device);
  return plain;
}

MixedPrecision bf16_precision() {
  return {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
}

Oracle::Oracle(const ModelCase& model, int world, const MixedPrecision& precision,
               at::Device device)
    : Oracle(model, build_reference(model, precision, device), world, precision) {}

Oracle::Oracle(const ModelCase& model, Built plain, int world, const MixedPrecision& precision)
    : model_(model), precision_(precision), plain_(std::move(plain)), losses_(world) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> trained;
  for (auto& [name, parameter] : plain_.parameters) {
    auto master = parameter.detach().clone();
    masters_.emplace_back(name, master.set_requires_grad(parameter.requires_grad()));
    if (parameter.requires_grad()) trained.push_back(master);
    gradients_.push_back(at::zeros(parameter.sizes(), at::kDouble));
    if (precision.param_dtype && at::isFloatingType(parameter.scalar_type()) &&
        !is_of_batch_norm(name, plain_.buffers))
      parameter.set_data(parameter.to(*precision.param_dtype));
  }
  for (int r = 0; r < world; ++r) buffers_.push_back(clones(plain_.buffers));
  optimizer_ = std::make_unique<torch::optim::SGD>(trained, sgd_options(model));
}

void Oracle::work_as(int rank, const RankWork& work) {
  copy(buffers_[rank], plain_.buffers);
  for (auto& [name, parameter] : plain_.parameters) parameter.mutable_grad() = at::Tensor();
  seed_work(runs_, rank);
  auto loss = work(plain_, rank);
  losses_[rank] = loss.defined() ? in_double(loss) : at::Tensor();
  copy(plain_.buffers, buffers_[rank]);
}

void Oracle::run(const RankWork& work, std::vector<double> weights) {
  int world = static_cast<int>(losses_.size());
  if (weights.empty()) weights.assign(world, 1.0);
  double sum = 0;
  for (double weight : weights) sum += weight;
  for (int r = 0; r < world; ++r) {
    work_as(r, work);
    for (size_t i = 0; i < gradients_.size(); ++i) {
      const auto& gradient = plain_.parameters[i].second.grad();
      if (gradient.defined()) gradients_[i] += in_double(gradient) * (weights[r] / sum);
    }
  }
  ++runs_;
}

void Oracle::step() {
  for (size_t i = 0; i < masters_.size(); ++i) {
    auto& master = masters_[i].second;
    if (master.requires_grad()) master.mutable_grad() = gradients_[i].to(master.options());
  }
  optimizer_->step();
  copy(masters_, plain_.parameters);
}

void Oracle::zero_grad() {
  for (auto& gradient : gradients_) gradient.zero_();
}

void Oracle::scale_gradients(double factor) {
  for (auto& gradient : gradients_) gradient.mul_(factor);
}

double Oracle::gradient_norm() const {
  double squares = 0;
  for (const auto& gradient : gradients_) squares += std::pow(norm_of(gradient), 2);
  return std::sqrt(squares);
}

SideBySide::SideBySide(const ModelCase& model, ShardOptions options)
    : model_(model),
      mine_(build_seeded(model)),
      oracle_(model, world_size(), options.mixed_precision, test_device()) {
  if (!options.wrap) options.wrap = model.wrap;
  if (!options.device) options.device = test_device();
  sharded_ = fully_shard(mine_.module, std::move(options));
  optimizer_ = std::make_unique<torch::optim::SGD>(sharded_.parameters(), sgd_options(model));
}

SideBySide::SideBySide(const ModelCase& model, Built mine, Sharded sharded, Oracle oracle)
    : model_(model),
      mine_(std::move(mine)),
      sharded_(std::move(sharded)),
      oracle_(std::move(oracle)),
      optimizer_(std::make_unique<torch::optim::SGD>(sharded_.parameters(), sgd_options(model))) {}

double SideBySide::tolerance() const {
  return oracle_.type() ? model_.bf16_tolerance : model_.tolerance;
}

Batch SideBySide::batch(int step, int rank) const {
  return moved(model_.batch(step, rank), test_device());
}

RankWork SideBySide::work(int step) const {
  return [this, step](Built& model, int rank) {
    // The plain copy gets inputs in the dtype of its parameters; the sharded model must cast them.
    auto type = &model == &mine_ ? std::nullopt : oracle_.type();
    auto loss = model.loss(moved(batch(step, rank), test_device(), type));
    loss.backward();
    return loss;
  };
}

at::Tensor SideBySide::run_mine(const RankWork& work) {
  seed_work(runs_++, rank());
  return work(mine_, rank());
}

void SideBySide::run(const RankWork& mine, const RankWork& reference, std::vector<double> weights) {
  auto loss = run_mine(mine);
  oracle_.run(reference, std::move(weights));
  expect_same_loss(loss);
  expect_same_gradients();
}

void SideBySide::step() {
  optimizer_->step();
  oracle_.step();
  drift_ += kLearningRate / (1 - model_.momentum) * tolerance() * oracle_.gradient_norm();
  expect_same_parameters();
  expect_same_buffers();
}

void SideBySide::zero_grad() {
  sharded_.zero_grad();
  oracle_.zero_grad();
}

void SideBySide::train(int steps, int first) {
  for (int i = first; i < first + steps; ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    run(work(i));
    step();
    zero_grad();
  }
}

void SideBySide::expect_same_loss(const at::Tensor& loss) {
  auto reference = oracle_.loss(rank());
  ASSERT_EQ(loss.defined(), reference.defined());
  if (!loss.defined()) return;
  double value = in_double(loss).item<double>(), expected = reference.item<double>();
  EXPECT_NEAR(value, expected, tolerance() * std::abs(expected)) << "loss of rank " << rank();
}

// full_tensor and full_grad gather all of a flat for one parameter. Here each flat is gathered
// once, which saves most of the collectives, and `full` is asked for one parameter, another one
// each time.
std::vector<at::Tensor> SideBySide::gathered(const FullOf& full, const ShardOf& shard_of) {
  const NamedTensors& masters = oracle_.masters();
  const size_t chosen = static_cast<size_t>(compared_++) % masters.size();
  const at::Tensor asked = full(masters[chosen].first);
  std::vector<at::Tensor> all;
  const auto model = shard::lock(sharded_);
  shard::Unseen unseen;
  std::map<shard::Flat*, at::Tensor> flats;
  for (const auto& [name, master] : masters) {
    auto [flat, i] = model->find(name);
    if (!flats.contains(flat)) {
      const at::Tensor shard = shard_of(*flat);
      flats[flat] =
          shard.defined() ? model->gatherer.gather_shard(*flat, shard, "a comparison") : shard;
    }
    all.push_back(flats[flat].defined() ? flat->view_of(i, flats[flat]) : at::Tensor());
  }
  EXPECT_EQ(asked.defined(), all[chosen].defined()) << masters[chosen].first;
  EXPECT_TRUE(!asked.defined() || at::equal(asked, all[chosen])) << masters[chosen].first;
  return all;
}

void SideBySide::expect_same_gradients() {
  double limit = tolerance() * oracle_.gradient_norm();
  const auto gradients = gathered([&](const std::string& name) { return sharded_.full_grad(name); },
                                  [](shard::Flat& flat) {
                                    if (flat.grad.defined()) flat.await_gradient();
                                    return flat.grad;
                                  });
  for (size_t i = 0; i < oracle_.masters().size(); ++i) {
    const auto& [name, master] = oracle_.masters()[i];
    const at::Tensor& gradient = gradients[i];
    auto expected = oracle_.gradient(i);
    if (!gradient.defined()) {
      EXPECT_EQ(norm_of(expected), 0) << "no gradient of " << name;
      continue;
    }
    ASSERT_EQ(gradient.sizes(), expected.sizes()) << name;
    double difference = norm_of(in_double(gradient) - expected);
    EXPECT_LE(difference, limit) << "gradient of " << name << ", whose norm is "
                                 << norm_of(expected) << " of " << oracle_.gradient_norm();
  }
}

void SideBySide::expect_same_parameters() {
  const auto values = gathered([&](const std::string& name) { return sharded_.full_tensor(name); },
                               [](shard::Flat& flat) { return flat.read_master(); });
  for (size_t i = 0; i < oracle_.masters().size(); ++i) {
    const auto& [name, master] = oracle_.masters()[i];
    const at::Tensor& value = values[i];
    ASSERT_EQ(value.sizes(), master.sizes()) << name;
    auto expected = in_double(master);
    double difference = norm_of(in_double(value) - expected);
    // The update is rounded to the master's dtype.
    double rounding = master.scalar_type() == at::kBFloat16 ? kBf16Epsilon : 1e-6;
    double limit = master.requires_grad() ? drift_ + rounding * norm_of(expected) : 0;
    EXPECT_LE(difference, limit) << "parameter " << name << ", whose norm is " << norm_of(expected);
  }
}

void SideBySide::expect_same_buffers() {
  const auto& expected = oracle_.buffers(rank());
  double relative = oracle_.type() ? 4 * kBf16Epsilon : 1e-5;
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto& [name, buffer] = mine_.buffers[i];
    ASSERT_EQ(name, expected[i].first);
    auto reference = in_double(expected[i].second);
    EXPECT_LE(norm_of(in_double(buffer) - reference), relative * norm_of(reference))
        << "buffer " << name;
  }
}

}  // namespace fsdp::testing
