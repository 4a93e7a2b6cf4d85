// The CUDA kernels of src/kernels/cuda, run on the CPU by simulate.h and called as on a GPU:
// through the operators of ops.h and the table of cuda_updates.h.
#pragma once

#include <memory>

#include "kernels/cuda_updates.h"

namespace fsdp::kernels {

// While it is alive, the operators of ops.h run the simulated kernels for CPU tensors. `reversed`:
// the last threads and the last blocks run first.
class Simulated {
 public:
  explicit Simulated(bool reversed = false);
  ~Simulated();
  Simulated(const Simulated&) = delete;
  Simulated& operator=(const Simulated&) = delete;

 private:
  struct Registration;
  std::unique_ptr<Registration> registration_;
};

// The table that the module registers on a GPU; it takes CPU tensors.
const CudaUpdates& simulated_updates();

// From now on, writing outside a CPU tensor ends the program: at once in the page after its end,
// otherwise when it is freed. Its memory is initialised to NaN.
void guard_memory();

}  // namespace fsdp::kernels
