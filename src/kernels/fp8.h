// Matrix products of one-byte numbers (e4m3 or e5m2), and the passes that make them, for the CPU,
// CUDA and meta tensors. The CPU emulates them: the bytes and factors have the same bits, and a
// product is one of float32.
//
// Tensor cores multiply along the last dimension of both operands only. A matrix that is multiplied
// along both of its dimensions therefore has two copies: its rows, and its columns as rows. Each
// has factors of its own, one for the matrix (tensorwise) or one per row (rowwise):
//   number = byte * factor
// All are powers of two (fp8_number.h). Bytes moved by a pass that writes both copies: it reads the
// matrix once and writes two bytes per element; finding the largest magnitudes reads it once more.
// A matrix that is made from another needn't exist: see Source.
//
// As the operators of ops.h: called through the dispatcher, recording no graph. An operator that
// reads a sharded parameter of another dtype than float32 gets its other inputs cast, so those that
// take a parameter in forward (quantise, rms_norm) take nothing that mustn't be.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fsdp::kernels::fp8 {

enum class Scaling { kTensorwise, kRowwise };

// The largest magnitudes of a matrix, float32: [1] and the same again (tensorwise), or [rows] and
// [columns]. What isn't wanted is undefined. A NaN counts as larger than infinity.
struct Amax {
  at::Tensor rows;
  at::Tensor columns;
};

// One copy of a matrix.
struct Bytes {
  at::Tensor data;     // [rows, length], float8_e4m3fn or float8_e5m2
  at::Tensor factors;  // [1] or [rows], float32
};

struct Quantised {
  Bytes rows;     // of x [rows, columns]
  Bytes columns;  // of xᵀ
};

struct Wanted {
  bool rows = false;
  bool columns = false;
};

// The matrix [rows, columns] to quantise, float32, bfloat16 or float16; both sizes are multiples of
// 16. What is computed as it is read has the bits of the operators in ops.h, rounded to x's dtype.
struct Source {
  at::Tensor x;             // the matrix …
  at::Tensor rstd, weight;  // … if defined: x * rstd * weight, the output of rms_norm
  bool swiglu = false;      // swiglu(x), x [rows, 2 * columns]

  Source(at::Tensor matrix) : x(std::move(matrix)) {}
  static Source normed(at::Tensor x, at::Tensor rstd, at::Tensor weight);
  static Source activated(at::Tensor gate_up);
};

Amax amax_of(const Source& source, Scaling scaling, Wanted wanted);
// The copies whose largest magnitudes are given. A magnitude beyond them saturates.
Quantised cast(const Source& source, const Amax& amax, bool e5m2 = false);
Quantised quantise(const Source& source, Scaling scaling, Wanted wanted, bool e5m2 = false);

// rms_norm() without its output: the rows of it, and what Source::normed needs.
struct NormedBytes {
  Bytes rows;
  at::Tensor sum;   // x + residual; empty [0] without a residual
  at::Tensor rstd;  // [rows]
  at::Tensor amax;  // the output's largest magnitudes, [1] or [rows]
};
NormedBytes rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                     double eps, Scaling scaling);

// Operators of ops.h whose result is a gradient that will be quantised tensorwise: they also return
// its largest magnitude, [1], which then needs no pass of its own. Empty [0]: not known.
struct WithAmax {
  at::Tensor result;
  at::Tensor amax;
};
struct NormGradientsAmax {
  at::Tensor x, out;  // as NormGradients
  at::Tensor amax;    // of x
};
NormGradientsAmax rms_norm_backward(const at::Tensor& grad, const at::Tensor& grad_sum,
                                    const at::Tensor& x, const at::Tensor& rstd,
                                    const at::Tensor& weight, const at::Tensor& grad_weight,
                                    bool accumulate, bool want_out);
WithAmax swiglu_backward(const at::Tensor& grad, const at::Tensor& gate_up);
WithAmax rope_pack(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& cos, const at::Tensor& sin);

// a · bᵀ (+ bias) in `type`: a [m, k], b [n, k], bias [n] of that type or undefined → [m, n]. At
// most one operand is e5m2. `fast`: sums may be kept with fewer bits for a while, as tensor cores
// do when they are fastest; for forward.
at::Tensor product(const Bytes& a, const Bytes& b, const at::Tensor& bias, at::ScalarType type,
                   bool fast);
// out = a · bᵀ, or out += a · bᵀ; out [m, n], rows contiguous.
void product_into(const at::Tensor& out, const Bytes& a, const Bytes& b, bool accumulate);

// Whether a matrix of these sizes can be quantised and multiplied.
inline bool fits(int64_t rows, int64_t columns) {
  return rows > 0 && columns > 0 && rows % 16 == 0 && columns % 16 == 0;
}

// --- checks of the arguments, for the kernels; sizes ---

struct Matrix {
  int64_t rows, columns;
};
Matrix check_source(const at::Tensor& x, const std::optional<at::Tensor>& rstd,
                    const std::optional<at::Tensor>& weight, bool swiglu);
void check_magnitudes(const Matrix& size, const at::Tensor& x,
                      const std::optional<at::Tensor>& row_amax,
                      const std::optional<at::Tensor>& column_amax);
struct Product {
  int64_t m, n, k;
};
Product check_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& a_factors,
                      const at::Tensor& b, const at::Tensor& b_factors,
                      const std::optional<at::Tensor>& bias);

}  // namespace fsdp::kernels::fp8
