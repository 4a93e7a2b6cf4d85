// A small residual network with BatchNorm that classifies patterns, trained sharded.
//
//   fsdp run -n 2 ./vision        in float32
//   fsdp run -n 2 ./vision bf16   convolutions and linears in bf16, BatchNorm in float32
//
// The images are drawn on the fly: horizontal, vertical or diagonal stripes, and rings, with random
// width, position and noise.
#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <cmath>
#include <iostream>
#include <string>

using torch::Tensor;

// --- the images ---

constexpr int64_t kClasses = 4, kSide = 16;

// Image `index` is the same on every rank.
class Patterns : public torch::data::datasets::Dataset<Patterns> {
 public:
  Patterns(int64_t first, int64_t count) : first_(first), count_(count) {}

  torch::data::Example<> get(size_t index) override {
    auto number = first_ + static_cast<int64_t>(index);
    at::Generator random = at::detail::createCPUGenerator(static_cast<uint64_t>(number));
    Tensor at = torch::rand({4}, random);
    auto between = [&](int i, double from, double to) {
      return from + (to - from) * at[i].item<double>();
    };
    Tensor line = torch::arange(kSide, torch::kFloat);
    Tensor x = line.view({1, kSide}), y = line.view({kSide, 1});
    int64_t kind = number % kClasses;
    Tensor where =
        kind == 0   ? (x + 0 * y) * 1.4
        : kind == 1 ? (y + 0 * x) * 1.4
        : kind == 2
            ? x + y
            : ((x - between(2, 4, 12)).square() + (y - between(3, 4, 12)).square()).sqrt() * 1.4;
    Tensor image = torch::sin(where * between(0, 0.7, 1.3) + between(1, 0, 6.28));
    image = image + 0.5 * torch::randn({kSide, kSide}, random);
    return {image.unsqueeze(0), torch::tensor(kind)};  // [1, kSide, kSide]
  }
  torch::optional<size_t> size() const override { return count_; }

 private:
  int64_t first_, count_;
};

// --- the model: nothing in it knows about sharding ---

torch::nn::Conv2d conv(int64_t in, int64_t out, int64_t stride) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(in, out, 3).stride(stride).padding(1).bias(false));
}

struct ResidualImpl : torch::nn::Module {
  ResidualImpl(int64_t in, int64_t out, int64_t stride)
      : first(register_module("first", conv(in, out, stride))),
        first_norm(register_module("first_norm", torch::nn::BatchNorm2d(out))),
        second(register_module("second", conv(out, out, 1))),
        second_norm(register_module("second_norm", torch::nn::BatchNorm2d(out))),
        beside(register_module("beside", conv(in, out, stride))) {}

  Tensor forward(Tensor x) {
    Tensor y = torch::relu(first_norm(first(x)));
    return torch::relu(beside(x) + second_norm(second(y)));
  }

  torch::nn::Conv2d first;
  torch::nn::BatchNorm2d first_norm;
  torch::nn::Conv2d second;
  torch::nn::BatchNorm2d second_norm;
  torch::nn::Conv2d beside;
};
TORCH_MODULE(Residual);

struct NetImpl : torch::nn::Module {
  NetImpl()
      : stem(register_module("stem", conv(1, 8, 1))),
        blocks(register_module(
            "blocks",
            torch::nn::Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 32, 2)))),
        head(register_module("head", torch::nn::Linear(32, kClasses))) {}

  Tensor forward(Tensor x) {  // [n, 1, kSide, kSide] to [n, kClasses]
    return head(blocks->forward(torch::relu(stem(x))).mean({2, 3}));
  }

  torch::nn::Conv2d stem;
  torch::nn::Sequential blocks;
  torch::nn::Linear head;
};
TORCH_MODULE(Net);

// --- training ---

template <typename Sampler>
auto loader(Patterns patterns, Sampler sampler, int64_t batch) {
  return torch::data::make_data_loader(patterns.map(torch::data::transforms::Stack<>()),
                                       std::move(sampler),
                                       torch::data::DataLoaderOptions().batch_size(batch));
}

// The share of held-out images that are classified correctly. Each rank checks its own part.
double accuracy(const fsdp::World& world, fsdp::ShardedModule<Net>& sharded) {
  torch::NoGradGuard no_grad;
  sharded.module()->eval();  // BatchNorm's statistics are each rank's own
  Patterns held_out(1'000'000, 256);
  fsdp::data::DistributedSampler sampler(
      {.size = 256, .world = world.size(), .rank = world.rank(), .shuffle = false});
  Tensor counts = torch::zeros({2}).to(world.device());  // correct, all
  auto batches = loader(held_out, sampler, 64);
  for (auto& batch : *batches) {
    Tensor guess = sharded.forward(batch.data.to(world.device())).argmax(1);
    counts[0] += (guess == batch.target.to(world.device())).sum();
    counts[1] += batch.target.numel();
  }
  world.comm().all_reduce(counts, fsdp::ReduceOp::SUM, {.label = "accuracy"});
  sharded.module()->train();
  return counts[0].item<double>() / counts[1].item<double>();
}

int train(bool bf16) {
  fsdp::World world = fsdp::init();
  torch::manual_seed(1);  // every rank builds the same model
  Net model;
  fsdp::ShardOptions options{.wrap = fsdp::wrap::modules<Residual>(), .device = world.device()};
  if (bf16)
    options.mixed_precision = {.param_dtype = torch::kBFloat16,
                               .reduce_dtype = torch::kFloat32,
                               .output_dtype = torch::kFloat32};
  auto sharded = fsdp::fully_shard(model, options);
  fsdp::AdamW optimizer(sharded, {.lr = 3e-3});
  if (world.rank() == 0) std::cout << sharded.describe() << std::endl;

  fsdp::TrainStep take_step(sharded, optimizer, [&](const auto& inputs) {
    return torch::cross_entropy_loss(sharded.forward(inputs[0]), inputs[1]);
  });
  const int64_t images = 1024, batch = 64;
  Patterns patterns(0, images);
  double before = accuracy(world, sharded), after = 0, first = 0, last = 0;
  fsdp::data::DistributedSampler sampler(
      {.size = images, .world = world.size(), .rank = world.rank(), .seed = 1});
  auto parts = loader(patterns, sampler, batch / world.size());
  for (int epoch = 0; epoch < 3; ++epoch) {
    sampler.set_epoch(epoch);  // another order
    for (auto& part : *parts) {
      last = take_step({part.data.to(world.device()), part.target.to(world.device())})
                 .loss.item<double>();
      if (first == 0) first = last;
    }
    after = accuracy(world, sharded);
    if (world.rank() == 0)
      std::cout << "epoch " << epoch << ", loss " << last << ", held-out accuracy "
                << std::round(100 * after) << " % (" << std::round(100 * before) << " % untrained)"
                << std::endl;
  }
  return last < first / 2 && after > 0.9 ? 0 : 1;
}

int main(int argc, char** argv) {
  std::string how = argc > 1 ? argv[1] : "";
  if (argc > 2 || (argc == 2 && how != "bf16")) {
    std::cerr << "usage: vision [bf16]" << std::endl;
    return 2;
  }
  try {
    return train(how == "bf16");
  } catch (const std::exception& error) {  // fsdp::Error names the rank, the problem and the remedy
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
