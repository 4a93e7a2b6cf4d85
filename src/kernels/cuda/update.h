// The CUDA kernels behind kernels/update.h and kernels/split.h, as plain functions of pointers and
// sizes. update_register.cpp checks tensors and calls these.
//
// As in launch.h, each function only launches, on `stream`; it allocates nothing, waits for nothing
// and may be captured into a graph. Lists may have any length (very long ones take several
// launches); the host reads them before a function returns. Any alignment works.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/launch.h"

namespace fsdp::kernels::cuda {

// How the arrays of an update are stored: the same for all pieces of a call.
struct UpdateStorage {
  bool split = false;            // the master is a bfloat16 and an int16 (kernels/split.h)
  Dtype grad = Dtype::kFloat32;  // or kBFloat16
  bool has_low = false;          // a copy of a float32 master is written, of dtype `low`
  Dtype low = Dtype::kBFloat16;  // or kFloat16
};

struct UpdatePiece {
  void* master = nullptr;      // [numel] float32, or the bfloat16 half
  void* low = nullptr;         // [numel] the copy, or the int16 half; null: neither
  const void* grad = nullptr;  // [numel]
  float* first = nullptr;      // [numel] exp_avg, or the momentum buffer (null: no momentum)
  float* second = nullptr;     // [numel] exp_avg_sq (adamw only)
  int64_t numel = 0;
  // Numbers of this piece, unless they are read from the device:
  //   adamw: 1 - lr * weight_decay, lr / (1 - beta1^step), 1 / sqrt(1 - beta2^step)
  //   sgd:   lr, weight_decay, 1 if the momentum buffer holds nothing yet (else 0)
  float numbers[3] = {0, 0, 0};
  int32_t group = 0;  // row of `rates`
  int32_t count = 0;  // index into `counts` and `corrections`
};

// What all pieces share. `factor` (one float, or null) is multiplied into gradients; if it isn't
// finite, nothing at all is written. `rates` is [groups, 2] (learning rate, weight decay), or null
// if every piece has its own numbers.
struct AdamWLaunch {
  float beta1 = 0, one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0, eps = 0;
  bool maximize = false;
  const float* factor = nullptr;
  const double* rates = nullptr;
  const double* corrections = nullptr;  // [counts, 2], from advance()
};
void adamw(const UpdatePiece* pieces, int64_t count, const UpdateStorage& storage,
           const AdamWLaunch& launch, cudaStream_t stream);

struct SGDLaunch {
  float momentum = 0, one_minus_dampening = 1;
  bool nesterov = false;
  bool maximize = false;
  const float* factor = nullptr;
  const double* rates = nullptr;
  const double* counts = nullptr;  // [counts], after advance(): 1 is the first update
};
void sgd(const UpdatePiece* pieces, int64_t count, const UpdateStorage& storage,
         const SGDLaunch& launch, cudaStream_t stream);

// Counts an update: adds 1 to counts[i] for every i in `which` (each at most once), unless `factor`
// isn't finite. Then, unless `corrections` is null, corrections[i] becomes {1 - beta1^counts[i], 1
// / sqrt(1 - beta2^counts[i])}.
void advance(double* counts, const int32_t* which, int64_t count, double* corrections, double beta1,
             double beta2, const float* factor, cudaStream_t stream);

// --- the global norm ---

struct SumPiece {
  const void* data = nullptr;  // [numel]
  int64_t numel = 0;
  Dtype dtype = Dtype::kFloat32;
};
// Doubles of scratch that sum_of_squares needs: at least 1.
int64_t sum_partials(const SumPiece* pieces, int64_t count);
// Squares are added in float32 within 16 bytes of memory and in float64 beyond that, in an order
// that depends only on the sizes. total, norm, factor: one number each, or null if not wanted.
//   norm = sqrt(total); factor = min(1, max_norm / (norm + 1e-6)), NaN if norm isn't finite
struct NormResult {
  double* total = nullptr;
  float* norm = nullptr;
  float* factor = nullptr;
  float max_norm = 0;
};
void sum_of_squares(const SumPiece* pieces, int64_t count, double* partials,
                    const NormResult& result, cudaStream_t stream);
// The same from a total.
void clip_factor(const double* total, const NormResult& result, cudaStream_t stream);

// --- the two halves of a float32 (kernels/split.h) ---

void split_float(const float* whole, void* high, int16_t* rest, int64_t numel, cudaStream_t stream);
void join_float(const void* high, const int16_t* rest, float* whole, int64_t numel,
                cudaStream_t stream);

}  // namespace fsdp::kernels::cuda
