// Sums the rank numbers over all ranks and prints the sum on rank 0: fsdp run -n 2 ./hello
#include <ATen/ATen.h>
#include <fsdp/fsdp.h>

#include <iostream>

int main() {
  try {
    fsdp::World world = fsdp::init();
    at::Tensor sum = at::full({1}, world.rank(), at::kLong).to(world.device());
    world.comm().all_reduce(sum);
    if (world.rank() == 0)
      std::cout << "hello from " << world.size() << " ranks over " << world.backend()
                << ": their numbers add up to " << sum.item<int64_t>() << std::endl;
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "hello: " << error.what() << std::endl;
    return 1;
  }
}
