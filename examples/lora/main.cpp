// Fine-tunes your own module with LoRA: the base is frozen, small adapters are trained.
//
//   fsdp run -n 2 ./lora [FILE]   rank 0 writes only the adapters to FILE
//
// Frozen parameters are sharded like the rest, but have no gradients and no optimizer states.
#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <cmath>
#include <iostream>
#include <string>

using torch::Tensor;

constexpr int64_t kDim = 96, kRank = 4, kDepth = 4;

// y = W x + B A x: W is the wrapped linear and stays frozen, A and B are trained. B starts at zero,
// so the first step sees the base alone.
struct LoRALinearImpl : torch::nn::Module {
  explicit LoRALinearImpl(torch::nn::Linear linear)
      : base(register_module("base", std::move(linear))) {
    for (Tensor& parameter : base->parameters()) parameter.requires_grad_(false);
    double bound = 1 / std::sqrt(base->options.in_features());
    lora_a = register_parameter(
        "lora_a", torch::empty({kRank, base->options.in_features()}).uniform_(-bound, bound));
    lora_b = register_parameter("lora_b", torch::zeros({base->options.out_features(), kRank}));
  }
  Tensor forward(const Tensor& x) {
    return base(x) + torch::linear(torch::linear(x, lora_a), lora_b);
  }

  torch::nn::Linear base;
  Tensor lora_a, lora_b;  // [kRank, in], [out, kRank]
};
TORCH_MODULE(LoRALinear);

struct BlockImpl : torch::nn::Module {
  LoRALinear up = register_module("up", LoRALinear(torch::nn::Linear(kDim, 2 * kDim)));
  LoRALinear down = register_module("down", LoRALinear(torch::nn::Linear(2 * kDim, kDim)));

  Tensor forward(const Tensor& x) { return x + down(torch::gelu(up(x))); }
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int64_t i = 0; i < kDepth; ++i) blocks->push_back(Block());
  }
  Tensor forward(const Tensor& x) { return blocks->forward(x); }

  torch::nn::Sequential blocks = register_module("blocks", torch::nn::Sequential());
};
TORCH_MODULE(Net);

bool is_adapter(const std::string& name) {
  return name.find(".lora_") != std::string::npos;
}

Net build() {
  torch::manual_seed(1);  // the same on every rank
  return Net();           // a real program would load its weights here
}

// The target: the same weights, each shifted by a matrix of rank kRank. The adapters can learn
// exactly that.
Net build_wanted() {
  Net net = build();
  torch::NoGradGuard no_grad;
  for (auto& item : net->named_parameters())
    if (item.key().ends_with(".lora_b")) item.value().normal_(0, 0.1);
  return net;
}

void save_adapters(const fsdp::Sharded& sharded, const fsdp::World& world,
                   const std::string& file) {
  fsdp::StateDict state = sharded.full_state_dict(/*rank0_only=*/true);  // collective
  if (world.rank() != 0) return;
  torch::serialize::OutputArchive archive;
  int64_t saved = 0, all = 0;
  for (const auto& [name, value] : state) {
    const Tensor& tensor = value.full();
    all += tensor.numel();
    if (!is_adapter(name)) continue;
    archive.write(name, tensor);
    saved += tensor.numel();
  }
  archive.save_to(file);
  std::cout << "saved " << saved << " of " << all << " parameters to " << file << std::endl;
}

int train(const std::string& file) {
  fsdp::World world = fsdp::init();
  Net model = build(), teacher = build_wanted();
  teacher->to(world.device());
  auto sharded =
      fsdp::fully_shard(model, {.wrap = fsdp::wrap::modules<Block>(), .device = world.device()});
  fsdp::AdamW optimizer(sharded, {.lr = 1e-2, .weight_decay = 0});
  if (world.rank() == 0) std::cout << sharded.describe() << std::endl;
  const std::string frozen = "blocks.0.up.base.weight";
  Tensor before = sharded.full_tensor(frozen).clone();

  fsdp::TrainStep take_step(sharded, optimizer, [&](const auto& inputs) {
    return torch::mse_loss(model->forward(inputs[0]), inputs[1]);
  });
  torch::manual_seed(100 + world.rank());  // each rank has its own data
  double first = 0, last = 0;
  for (int step = 0; step <= 120; ++step) {
    Tensor x = torch::randn({32, kDim}).to(world.device());
    Tensor y;
    {
      torch::NoGradGuard no_grad;
      y = teacher->forward(x);
    }
    last = take_step({x, y}).loss.item<double>();
    if (step == 0) first = last;
    if (world.rank() == 0 && step % 30 == 0)
      std::cout << "step " << step << ", loss " << last << std::endl;
  }
  fsdp::MemoryReport memory = sharded.memory();
  bool unchanged = torch::equal(before, sharded.full_tensor(frozen));
  if (world.rank() == 0)
    std::cout << "\nbytes held by this rank\n"
              << memory.table() << "the base is " << (unchanged ? "" : "NOT ")
              << "unchanged, bit for bit" << std::endl;
  save_adapters(sharded, world, file);

  bool small = memory.gradients < memory.parameters / 5 && memory.optimizer < memory.parameters / 2;
  return last < first / 10 && unchanged && small ? 0 : 1;
}

int main(int argc, char** argv) {
  try {
    return train(argc > 1 ? argv[1] : "adapters.pt");
  } catch (const std::exception& error) {  // fsdp::Error names the rank, the problem and the remedy
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
