// The README's program: your own module, trained sharded and saved.
//
//   fsdp run -n 2 ./quickstart [FOLDER]   the checkpoint goes to FOLDER/step-100
#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <filesystem>
#include <iostream>
#include <utility>
#include <vector>

// A module like any other. Nothing in it knows about sharding.
struct BlockImpl : torch::nn::Module {
  torch::nn::Linear up = register_module("up", torch::nn::Linear(32, 128));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(128, 32));

  torch::Tensor forward(torch::Tensor x) { return x + down(torch::gelu(up(x))); }
};
TORCH_MODULE(Block);

// 100 batches for this rank; no other rank has the same. The model learns a product of two inputs.
std::vector<std::pair<torch::Tensor, torch::Tensor>> batches(const fsdp::World& world) {
  torch::manual_seed(100 + world.rank());
  std::vector<std::pair<torch::Tensor, torch::Tensor>> all;
  for (int i = 0; i < 100; ++i) {
    torch::Tensor x = torch::randn({64, 32}).to(world.device());  // [samples, features]
    all.emplace_back(x, x.slice(1, 0, 1) * x.slice(1, 1, 2));     // [samples, 1]
  }
  return all;
}

int train(const std::filesystem::path& folder) {
  std::vector<double> losses;

  fsdp::World world = fsdp::init();  // fsdp run, torchrun, mpirun, srun, or one process alone
  torch::manual_seed(1);             // every rank builds the same weights
  torch::nn::Sequential model(Block(), Block(), Block(), torch::nn::Linear(32, 1));
  auto sharded = fsdp::fully_shard(model, {.wrap = fsdp::wrap::modules<Block>()});
  fsdp::AdamW optimizer(sharded, {.lr = 3e-3});
  for (const auto& [x, y] : batches(world)) {  // every rank has its own
    torch::Tensor loss = torch::mse_loss(model->forward(x), y);
    loss.backward();
    sharded.clip_grad_norm_(1.0);
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
  }
  fsdp::checkpoint::save(folder / "step-100", sharded, &optimizer);

  if (world.rank() == 0) {
    for (size_t step = 20; step <= losses.size(); step += 20)
      std::cout << "step " << step << ", loss " << losses[step - 1] << std::endl;
    std::cout << "saved to " << (folder / "step-100").string() << std::endl;
  }
  return losses.back() < losses.front() / 2 ? 0 : 1;
}

int main(int argc, char** argv) {
  try {
    return train(argc > 1 ? argv[1] : "quickstart-run");
  } catch (const std::exception& error) {  // fsdp::Error says who, what, and what to do
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
