// The CUDA kernels of src/kernels/cuda, run on the CPU by simulate.h and reached as on a GPU:
// through the operators of ops.h, and through the table of cuda_updates.h.
#pragma once

#include <memory>

#include "kernels/cuda_updates.h"

namespace fsdp::kernels {

// While it lives, the operators of ops.h run the simulated kernels for tensors of the CPU.
// `reversed`: the last threads and the last blocks run first.
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

// What the module hands in on a GPU; takes tensors of the CPU.
const CudaUpdates& simulated_updates();

// From now on every tensor on the CPU is made where writing outside of it ends the program: at
// once behind its end's page, at the latest when it is given back. Its memory begins as NaN.
void guard_memory();

}  // namespace fsdp::kernels
