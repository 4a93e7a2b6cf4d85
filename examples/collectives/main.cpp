// Collectives without a model: a mean over all ranks, an all-gather without copies, a mesh.
#include <ATen/ATen.h>
#include <fsdp/fsdp.h>

#include <iostream>

void run() {
  fsdp::World world = fsdp::init();  // fsdp run, torchrun, mpirun, srun, or one process alone
  const fsdp::Communicator& comm = world.comm();

  // A mean over all ranks.
  at::Tensor loss = at::full({1}, 1.0 + world.rank()).to(world.device());
  comm.all_reduce(loss, fsdp::ReduceOp::AVG, {.label = "loss"});

  // An all-gather in place. Over shm the buffer is one memory for all ranks: nothing is copied.
  const int64_t part = 1024;
  at::Tensor all = comm.gather_buffer(part * world.size(), at::kFloat, world.device());
  at::Tensor mine = all.narrow(0, world.rank() * part, part);
  mine.fill_(world.rank());
  fsdp::Work gather = comm.all_gather(all, mine, {.async = true});
  // ... compute something else ...
  gather.wait();

  // Ranks by name: rows of 2 that shard, repeated as often as it fits.
  int shard = world.size() % 2 == 0 ? 2 : 1;
  fsdp::DeviceMesh mesh(world, {{"replicate", world.size() / shard}, {"shard", shard}});
  at::Tensor row = at::ones({1}).to(world.device());
  mesh.comm("shard").all_reduce(row);

  if (world.rank() == 0)
    std::cout << "mean loss " << loss.item<float>() << ", gathered sum " << all.sum().item<float>()
              << ", ranks in my row " << row.item<float>() << std::endl;
}

int main() {
  try {
    run();
  } catch (const std::exception& error) {  // fsdp::Error names the rank, the problem and the remedy
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
