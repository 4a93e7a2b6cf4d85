// The README's program: a module of one's own, trained sharded and saved.
//
//   fsdp run -n 2 ./quickstart [FOLDER]   the checkpoint goes to FOLDER/step-100
#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <filesystem>
#include <iostream>

// A module like any other. Nothing in it knows of sharding.
struct BlockImpl : torch::nn::Module {
  torch::nn::Linear up = register_module("up", torch::nn::Linear(32, 128));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(128, 32));

  torch::Tensor forward(torch::Tensor x) { return x + down(torch::gelu(up(x))); }
};
TORCH_MODULE(Block);

int train(const std::filesystem::path& folder) {
  fsdp::World world = fsdp::init();  // fsdp run, torchrun, mpirun, srun, or one process alone
  torch::manual_seed(1);             // every rank builds the same model …
  torch::nn::Sequential model(Block(), Block(), Block(), torch::nn::Linear(32, 1));
  auto sharded = fsdp::fully_shard(model, {.wrap = fsdp::wrap::modules<Block>()});
  fsdp::AdamW optimizer(sharded, {.lr = 3e-3});

  torch::manual_seed(100 + world.rank());  // … and has its own part of every batch
  double first = 0, last = 0;
  for (int step = 1; step <= 100; ++step) {
    torch::Tensor x = torch::randn({64, 32}).to(world.device());
    torch::Tensor y = x.slice(1, 0, 1) * x.slice(1, 1, 2);  // what it learns: a product
    torch::Tensor loss = torch::mse_loss(model->forward(x), y);
    loss.backward();
    sharded.clip_grad_norm_(1.0);
    optimizer.step();
    optimizer.zero_grad();
    last = loss.item<double>();
    if (step == 1) first = last;
    if (world.rank() == 0 && step % 20 == 0)
      std::cout << "step " << step << ", loss " << last << std::endl;
  }
  fsdp::checkpoint::save(folder / "step-100", sharded, &optimizer);
  if (world.rank() == 0) std::cout << "saved to " << (folder / "step-100").string() << std::endl;
  return last < first / 2 ? 0 : 1;
}

int main(int argc, char** argv) {
  try {
    return train(argc > 1 ? argv[1] : "quickstart-run");
  } catch (const std::exception& error) {  // fsdp::Error says who, what, and what to do
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
