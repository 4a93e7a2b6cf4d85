// The CUDA kernels behind kernels/ops.h, as plain functions of pointers and sizes, so that nvcc
// never sees a LibTorch header. register.cpp checks tensors and calls these.
//
// Each function only launches, on `stream`: it allocates nothing, waits for nothing and may be
// captured into a graph. Launch errors stay in cudaGetLastError. Sizes and strides are in elements.
// Rows are contiguous and adjacent unless a stride is given. Pointers marked "or null" may be null.
// Sums are computed in float32, in an order that depends only on the sizes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fsdp::kernels::cuda {

enum class Dtype : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// --- normalisation ---

struct NormForward {
  const void* x = nullptr;         // [rows, dim]
  const void* residual = nullptr;  // [rows, dim] or null
  const void* weight = nullptr;    // [dim]
  const void* bias = nullptr;      // [dim] or null
  void* out = nullptr;             // [rows, dim]; null with amax
  void* sum = nullptr;             // [rows, dim]; null without a residual
  float* mean = nullptr;           // [rows]; layer_norm only
  float* rstd = nullptr;           // [rows]
  float* amax = nullptr;           // rms_norm: out's largest magnitude instead of out; or null
  bool amax_per_row = false;       // [rows], else [1]
  int64_t rows = 0;
  int64_t dim = 0;
  float eps = 0;
  Dtype dtype = Dtype::kFloat32;
};
void rms_norm(const NormForward& norm, cudaStream_t stream);
void layer_norm(const NormForward& norm, cudaStream_t stream);

struct NormBackward {
  const void* grad = nullptr;        // [rows, dim]
  const void* grad_sum = nullptr;    // [rows, dim] or null
  const void* x = nullptr;           // [rows, dim]
  const float* mean = nullptr;       // [rows]; layer_norm only
  const float* rstd = nullptr;       // [rows]
  const void* weight = nullptr;      // [dim]
  const void* bias = nullptr;        // [dim] or null; read only if `out` is wanted
  void* grad_x = nullptr;            // [rows, dim]
  void* out = nullptr;               // [rows, dim] or null: not wanted
  void* grad_weight = nullptr;       // [dim] of grad_weight_dtype, or null: not wanted
  void* grad_bias = nullptr;         // [dim] of grad_bias_dtype, or null: not wanted
  float* weight_partials = nullptr;  // [norm_partials(rows, dim), dim], scratch for grad_weight
  float* bias_partials = nullptr;    // the same for grad_bias
  float* amax = nullptr;             // one: grad_x's largest magnitude; or null: not wanted
  int64_t rows = 0;
  int64_t dim = 0;
  Dtype dtype = Dtype::kFloat32;
  Dtype grad_weight_dtype = Dtype::kFloat32;
  Dtype grad_bias_dtype = Dtype::kFloat32;
  bool accumulate = false;
};
// Rows of scratch for a parameter's gradient; the same on every device.
int64_t norm_partials(int64_t rows, int64_t dim);
// Whether rms_norm_backward can also give amax.
bool finds_amax(const NormBackward& norm);
void rms_norm_backward(const NormBackward& norm, cudaStream_t stream);
void layer_norm_backward(const NormBackward& norm, cudaStream_t stream);

// --- rotary positions ---

struct RopeTable {  // [tokens, head_dim] (batch_stride 0) or [batch, tokens, head_dim]
  const void* cos = nullptr;
  const void* sin = nullptr;
  int64_t batch_stride = 0;
  bool float32 = false;  // else the dtype of what is rotated
};

struct Rope {
  void* x = nullptr;  // [batch, tokens, heads * head_dim], each token's heads side by side
  int64_t batch_stride = 0;
  int64_t token_stride = 0;
  RopeTable table;
  int64_t batch = 0;
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;  // even
  bool inverse = false;
  Dtype dtype = Dtype::kFloat32;
};
void rope(const Rope& rope, cudaStream_t stream);

struct HeadsView {  // [batch, heads, tokens, head_dim], the last dimension contiguous
  const void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
};

struct RopePack {
  HeadsView q, k, v;
  void* out = nullptr;    // [batch, tokens, (heads + 2 * kv_heads) * head_dim]
  float* amax = nullptr;  // one: out's largest magnitude; or null: not wanted
  RopeTable table;
  int64_t batch = 0;
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;  // even
  Dtype dtype = Dtype::kFloat32;
};
void rope_pack(const RopePack& rope, cudaStream_t stream);

// --- activations ---

// gate_up [rows, 2 * width] → out [rows, width]
void swiglu(const void* gate_up, void* out, int64_t rows, int64_t width, Dtype dtype,
            cudaStream_t stream);
// grad [rows, width]; out [rows, width] or null: not wanted; amax: one, grad_gate_up's largest
// magnitude, or null: not wanted
void swiglu_backward(const void* grad, const void* gate_up, void* grad_gate_up, void* out,
                     float* amax, int64_t rows, int64_t width, Dtype dtype, cudaStream_t stream);
void gelu(const void* x, void* out, int64_t numel, bool tanh, Dtype dtype, cudaStream_t stream);
void gelu_backward(const void* grad, const void* x, void* grad_x, void* out, int64_t numel,
                   bool tanh, Dtype dtype, cudaStream_t stream);

// target = source * scale, or target += source * scale; scale one float or null: 1
void scale_into(void* target, Dtype target_dtype, const void* source, Dtype source_dtype,
                const float* scale, bool accumulate, int64_t numel, cudaStream_t stream);

// --- random numbers ---

struct FillRandom {
  void* out = nullptr;  // [numel]
  int64_t numel = 0;
  int64_t first = 0;  // number of the sequence at out[0]
  uint64_t key = 0;
  bool normal = false;
  float a = 0;  // mean, or the least value
  float b = 0;  // deviation, or the width of the range
  Dtype dtype = Dtype::kFloat32;
};
void fill_random(const FillRandom& fill, cudaStream_t stream);

// --- loss and embedding ---

struct CrossEntropy {
  const void* logits = nullptr;  // [rows, vocab], rows `row_stride` apart
  int64_t row_stride = 0;
  const int64_t* targets = nullptr;  // [rows]
  float* losses = nullptr;           // [rows]
  float* log_sum = nullptr;          // [rows], or null: not wanted
  void* gradient = nullptr;          // the logits again, to be overwritten; or null: not wanted
  const float* scale = nullptr;      // one float: the gradient's factor
  int64_t rows = 0;
  int64_t vocab = 0;
  int64_t ignore_index = 0;
  Dtype dtype = Dtype::kFloat32;
};
void cross_entropy(const CrossEntropy& loss, cudaStream_t stream);

struct CrossEntropyBackward {
  const float* grad = nullptr;   // [rows]
  const void* logits = nullptr;  // [rows, vocab], rows `row_stride` apart
  int64_t row_stride = 0;
  const int64_t* targets = nullptr;  // [rows]
  const float* log_sum = nullptr;    // [rows]
  void* grad_logits = nullptr;       // [rows, vocab]
  int64_t rows = 0;
  int64_t vocab = 0;
  int64_t ignore_index = 0;
  Dtype dtype = Dtype::kFloat32;
};
void cross_entropy_backward(const CrossEntropyBackward& loss, cudaStream_t stream);

struct EmbeddingBackward {
  const void* grad = nullptr;      // [rows, dim]
  const int64_t* ids = nullptr;    // [rows]; sorted if `order` is given
  const int64_t* order = nullptr;  // [rows]: ids[i] belongs to grad[order[i]]; null: grad[i]
  void* grad_weight = nullptr;     // [vocab, dim] of grad_weight_dtype
  float* partials = nullptr;       // [embedding_partials(rows), dim], scratch with `order`
  int64_t rows = 0;
  int64_t dim = 0;
  int64_t vocab = 0;
  int64_t padding_idx = -1;
  Dtype dtype = Dtype::kFloat32;
  Dtype grad_weight_dtype = Dtype::kFloat32;
  bool accumulate = false;
};
// Up to this many rows, ids may be unsorted, without `order`; above it they must be sorted (stably:
// equal ids in row order).
constexpr int64_t kUnsortedRows = 1024;
int64_t embedding_partials(int64_t rows);
void embedding_backward(const EmbeddingBackward& embedding, cudaStream_t stream);

}  // namespace fsdp::kernels::cuda
