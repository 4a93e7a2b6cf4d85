// limited_program PRECISION STATES LIMIT RESULT: trains 20 steps, with little memory from the first
// update on.
//
// PRECISION: split or whole, the storage of the masters of bfloat16 parameters. STATES: where
// masters and states are: a directory, "host", or "device" for no offload. LIMIT: bytes the process
// may allocate beyond what it has before the first update; 0 for no limit. After the steps it saves
// a checkpoint, RESULT.checkpoint, loads it after one more step, and loads it into a new model.
// Then it lifts the limit and writes every bit of parameters, masters and states to the file
// RESULT.
//
// Exits with 3 and a message if memory ran out, with 77 if memory can't be limited.
#include <malloc.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include "fsdp/checkpoint.h"
#include "fsdp/fsdp.h"
#include "fsdp/optim.h"
#include "optim/states.h"
#include "shard/engine.h"
#include "shard/limited.h"
#include "shard/model.h"
#include "shard/update.h"

namespace {

using namespace fsdp;

constexpr int kSteps = 20;

// Allocates tensors directly from the system and returns them directly: LibTorch's own allocator
// may reserve a gigabyte at once and ignore the limit (mimalloc, on aarch64).
class PlainAllocator final : public c10::Allocator {
 public:
  PlainAllocator() {
    ::mallopt(M_MMAP_THRESHOLD, 64 << 10);
    c10::SetCPUAllocator(this, /*priority=*/1);
  }
  c10::DataPtr allocate(size_t bytes) override {
    constexpr size_t kLine = 64;
    void* const data = std::aligned_alloc(kLine, (bytes / kLine + 1) * kLine);
    TORCH_CHECK(data, "not enough memory: you tried to allocate ", bytes, " bytes.");
    return {data, data, &std::free, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

struct Training {
  torch::nn::Sequential model;
  Sharded sharded;
  std::unique_ptr<Optimizer> optimizer;

  void backward(int step) {
    torch::manual_seed(100 + step);
    model->forward(at::randn({2, fsdp::testing::kLimitedWidth})).square().mean().backward();
  }
  void update() {
    optimizer->step();
    optimizer->zero_grad();
  }
};

Training start(const std::string& precision, const std::string& states) {
  Training run;
  torch::manual_seed(3);
  for (int i = 0; i < fsdp::testing::kLimitedLayers; ++i)
    run.model->push_back(
        torch::nn::Linear(fsdp::testing::kLimitedWidth, fsdp::testing::kLimitedWidth));
  Offload offload;
  offload.optimizer = states != "device";
  if (states != "device" && states != "host") offload.directory = states;
  run.sharded = fully_shard(run.model, {.wrap = wrap::modules<torch::nn::LinearImpl>(),
                                        .mixed_precision = {.param_dtype = at::kBFloat16,
                                                            .split_master = precision == "split"},
                                        .device = at::Device(at::kCPU),
                                        .offload = std::move(offload)});
  run.optimizer =
      std::make_unique<AdamW>(run.sharded, AdamWOptions{.lr = 1e-3, .weight_decay = 0.1});
  return run;
}

// Private writable memory of the process, which RLIMIT_DATA limits.
rlim_t bytes_of_data() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (word == "VmData:") {
      rlim_t kibibytes = 0;
      status >> kibibytes;
      return kibibytes << 10;
    }
  return 0;
}

// Whether the system enforces the limit.
bool limit(rlim_t more) {
  rlimit now{};
  const rlim_t data = bytes_of_data();
  if (data == 0 || ::getrlimit(RLIMIT_DATA, &now) != 0) return false;
  now.rlim_cur = data + more;
  if (::setrlimit(RLIMIT_DATA, &now) != 0) return false;
  void* const tried =
      ::mmap(nullptr, 2 * more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return tried == MAP_FAILED;
}

void lift_limit() {
  rlimit now{};
  ::getrlimit(RLIMIT_DATA, &now);
  now.rlim_cur = now.rlim_max;
  ::setrlimit(RLIMIT_DATA, &now);
}

void write(const Training& run, const std::string& path) {
  at::NoGradGuard no_grad;
  std::ofstream file(path, std::ios::binary);
  const auto put = [&](const at::Tensor& tensor) {
    const at::Tensor flat = tensor.contiguous();
    file.write(static_cast<const char*>(flat.const_data_ptr()),
               static_cast<std::streamsize>(flat.nbytes()));
  };
  for (const auto& parameter : run.model->named_parameters())
    put(run.sharded.full_tensor(parameter.key()));
  for (const auto* flat : shard::trainable_flats(*shard::lock(run.sharded))) {
    put(flat->read_master());
    for (const auto& state : optim::states_of(*run.optimizer).slots(*flat)) put(state);
  }
  if (!file.flush()) throw std::runtime_error("could not write " + path);
}

int train(const std::string& precision, const std::string& states, rlim_t more,
          const std::string& result) {
  static PlainAllocator allocator;
  const auto world = init();
  Training run = start(precision, states);
  run.backward(0);
  if (more > 0 && !limit(more)) {
    std::cout << "memory cannot be limited here (RLIMIT_DATA)\n";
    return 77;
  }
  try {
    for (int step = 0; step < kSteps; ++step) {
      if (step > 0) run.backward(step);
      run.update();
    }
    shard::await_updates(*shard::lock(run.sharded));
    checkpoint::save(result + ".checkpoint", run.sharded, run.optimizer.get());
    run.backward(kSteps);
    run.update();
    checkpoint::load(result + ".checkpoint", run.sharded, run.optimizer.get());
    run = {};
    run = start(precision, states);
    checkpoint::load(result + ".checkpoint", run.sharded, run.optimizer.get());
  } catch (const std::exception& problem) {
    lift_limit();
    std::cout << problem.what() << "\n";
    return 3;
  }
  lift_limit();
  write(run, result);
  return 0;
}

}  // namespace

int main(int count, char** words) {
  if (count != 5) return 2;
  try {
    return train(words[1], words[2], std::strtoull(words[3], nullptr, 10), words[4]);
  } catch (const std::exception& problem) {
    std::cerr << problem.what() << "\n";
    return 1;
  }
}
