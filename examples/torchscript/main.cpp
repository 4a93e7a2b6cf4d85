// A model written in Python, trained sharded without Python.
//
//   python3 model.py model.pt                      needs torch; writes the file once
//   fsdp run -n 2 ./torchscript model.pt [OUT]     trains it; rank 0 writes it back to OUT
#include <fsdp/fsdp.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <iostream>
#include <string>

using torch::Tensor;

// Writes the trained model as TorchScript: the original file with the new values.
void save(const fsdp::Sharded& sharded, const fsdp::World& world, const std::string& file,
          const std::string& out) {
  fsdp::StateDict state = sharded.full_state_dict(/*rank0_only=*/true);  // collective
  if (world.rank() != 0) return;
  torch::NoGradGuard no_grad;
  torch::jit::Module plain = torch::jit::load(file);
  for (const auto& item : plain.named_parameters())
    item.value.copy_(state.at(item.name));
  plain.save(out);
  std::cout << "saved to " << out << std::endl;
}

int train(const std::string& file, const std::string& out) {
  fsdp::World world = fsdp::init();
  torch::jit::Module model = torch::jit::load(file, world.device());
  auto sharded = fsdp::fully_shard(model, {.wrap = fsdp::wrap::types({"Block"})});
  fsdp::AdamW optimizer(sharded, {.lr = 3e-3});
  if (world.rank() == 0) std::cout << sharded.describe() << std::endl;

  fsdp::TrainStep take_step(
      sharded, optimizer,
      [&](const auto& inputs) {
        return torch::mse_loss(model.forward({inputs[0]}).toTensor(), inputs[1]);
      },
      {.clip = 1.0});
  torch::manual_seed(100 + world.rank());  // each rank has its own data
  double first = 0, last = 0;
  for (int step = 0; step <= 120; ++step) {
    Tensor x = torch::randn({64, 8}).to(world.device());
    Tensor y = x.slice(1, 0, 1) * x.slice(1, 1, 2);  // the target: a product
    last = take_step({x, y}).loss.item<double>();
    if (step == 0) first = last;
    if (world.rank() == 0 && step % 30 == 0)
      std::cout << "step " << step << ", loss " << last << std::endl;
  }
  if (!out.empty()) save(sharded, world, file, out);
  return last < first / 2 ? 0 : 1;
}

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: torchscript FILE [OUT]; model.py writes FILE" << std::endl;
    return 2;
  }
  try {
    return train(argv[1], argc > 2 ? argv[2] : "");
  } catch (const std::exception& error) {  // fsdp::Error names the rank, the problem and the remedy
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
