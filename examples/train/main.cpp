// Your own module, trained sharded: fsdp run -n 2 ./train
//
//   train               plain construction, in float32
//   train large         deferred construction, in bf16
//   train script FILE   from Python: torch.jit.script(model).save(FILE), 8 numbers in, 1 out
#include <fsdp/fsdp.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <functional>
#include <iostream>
#include <string>

using torch::Tensor;

// --- the model: nothing in it knows about sharding ---

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t dim)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})))),
        up(register_module("up", torch::nn::Linear(dim, 4 * dim))),
        down(register_module("down", torch::nn::Linear(4 * dim, dim))) {}

  Tensor forward(Tensor x) { return x + down(torch::gelu(up(norm(x)))); }

  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl(int64_t dim, int64_t depth)
      : in(register_module("in", torch::nn::Linear(8, dim))),
        blocks(register_module("blocks", torch::nn::Sequential())),
        out(register_module("out", torch::nn::Linear(dim, 1))) {
    for (int64_t i = 0; i < depth; ++i) blocks->push_back(Block(dim));
  }

  Tensor forward(Tensor x) { return out(blocks->forward(in(x))); }  // [n, 8] to [n, 1]

  torch::nn::Linear in;
  torch::nn::Sequential blocks;
  torch::nn::Linear out;
};
TORCH_MODULE(Net);

// --- the data: the target is the product of the first two of eight numbers ---

struct Batch {
  Tensor x, y;
};

// Each rank has its own part of a step's batch.
Batch batch_of(int step, const fsdp::World& world) {
  uint64_t seed = 1000 * step + world.rank();
  Tensor x = torch::randn({64, 8}, at::detail::createCPUGenerator(seed)).to(world.device());
  return {x, x.slice(1, 0, 1) * x.slice(1, 1, 2)};
}

void show(int step, Tensor loss, const fsdp::World& world) {
  loss = loss.detach().clone();
  world.comm().all_reduce(loss, fsdp::ReduceOp::AVG, {.label = "loss"});
  if (world.rank() == 0)
    std::cout << "step " << step << ", loss " << loss.item<float>() << std::endl;
}

// --- training ---

void train() {
  fsdp::World world = fsdp::init();
  torch::manual_seed(1);  // every rank builds the same model
  Net model(64, 4);
  auto sharded = fsdp::fully_shard(model, {.wrap = fsdp::wrap::modules<Block>()});
  fsdp::AdamW optimizer(sharded, {.lr = 3e-3});
  if (world.rank() == 0) std::cout << sharded.describe() << std::endl;

  for (int step = 0; step <= 200; ++step) {
    auto [x, y] = batch_of(step, world);
    Tensor loss = torch::mse_loss(model->forward(x), y);  // the model's own code
    loss.backward();
    sharded.clip_grad_norm_(1.0);
    optimizer.step();
    optimizer.zero_grad();
    if (step % 50 == 0) show(step, loss, world);
  }
}

// The same with a learning-rate schedule, by TrainStep: on a GPU, a step becomes one CUDA graph.
void fit(const fsdp::World& world, const fsdp::Sharded& sharded,
         const std::function<Tensor(Tensor)>& forward) {
  fsdp::AdamW optimizer(sharded, {.lr = 3e-3, .weight_decay = 0.1, .groups = {fsdp::no_decay()}});
  fsdp::LRScheduler scheduler(optimizer,
                              fsdp::LRSchedule::cosine({.total_steps = 201, .warmup_steps = 20}));
  if (world.rank() == 0) std::cout << sharded.describe() << std::endl;

  fsdp::TrainStep step(
      sharded, optimizer,
      [&](const auto& inputs) { return torch::mse_loss(forward(inputs[0]), inputs[1]); },
      {.clip = 1.0});
  for (int i = 0, known = 0; i <= 200; ++i) {
    auto [x, y] = batch_of(i, world);
    step({x, y});
    scheduler.step();
    if (i == 200) step.wait();
    for (; auto outcome = step.outcome(); ++known)  // losses come when the device has them
      if (world.rank() == 0 && known % 50 == 0)
        std::cout << "step " << known << ", loss " << outcome->loss << std::endl;
  }
}

void train_large() {
  fsdp::World world = fsdp::init();
  torch::manual_seed(1);
  Net model = fsdp::deferred_init([] { return Net(64, 4); });  // no memory yet
  fsdp::ShardOptions options{
      .wrap = fsdp::wrap::min_params(10'000),
      .mixed_precision = {.param_dtype = torch::kBFloat16,  // of parameters in operators
                          .reduce_dtype = torch::kFloat32,  // of gradients on their way
                          .output_dtype = torch::kFloat32,  // of what sharded.forward returns
                          .norms_in_fp32 = true}};
  auto sharded = fsdp::fully_shard(model, options);
  fit(world, sharded, [&](Tensor x) { return sharded.forward(x); });
}

fsdp::Distribution start_of(const std::string& name, at::IntArrayRef sizes) {
  if (sizes.size() > 1) return fsdp::Distribution::normal(0, 0.1);
  return fsdp::Distribution::constant(name.ends_with("bias") ? 0 : 1);
}

void train_by_rule() {
  fsdp::World world = fsdp::init();
  Net model = fsdp::deferred_init([] { return Net(64, 4); }, {.random = false});
  auto sharded =
      fsdp::fully_shard(model, {.wrap = fsdp::wrap::min_params(10'000), .initialize = false});
  fsdp::init_parameters(sharded, /*seed=*/1, start_of);
  fit(world, sharded, [&](Tensor x) { return sharded.forward(x); });
}

void train_script(const std::string& file) {
  fsdp::World world = fsdp::init();
  torch::jit::Module model = torch::jit::load(file, world.device());
  auto sharded = fsdp::fully_shard(model, {.wrap = fsdp::wrap::types({"Block"})});
  fit(world, sharded, [&](Tensor x) { return model.forward({x}).toTensor(); });
}

int main(int argc, char** argv) {
  std::string what = argc > 1 ? argv[1] : "";
  try {
    if (argc == 1)
      train();
    else if (argc == 2 && what == "large")
      train_large();
    else if (argc == 2 && what == "by-rule")
      train_by_rule();
    else if (argc == 3 && what == "script")
      train_script(argv[2]);
    else
      throw std::runtime_error("usage: train [large | by-rule | script FILE]");
  } catch (const std::exception& error) {  // fsdp::Error names the rank, the problem and the remedy
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
