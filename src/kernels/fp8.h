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
//
// As the operators of ops.h: called through the dispatcher, recording no graph.
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

// x [rows, columns], float32, bfloat16 or float16; both sizes are multiples of 16.
Amax amax_of(const at::Tensor& x, Scaling scaling, Wanted wanted);
// The copies whose largest magnitudes are given. A magnitude beyond them saturates.
Quantised cast(const at::Tensor& x, const Amax& amax, bool e5m2 = false);
Quantised quantise(const at::Tensor& x, Scaling scaling, Wanted wanted, bool e5m2 = false);

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
Matrix check_amax(const at::Tensor& x);
Matrix check_cast(const at::Tensor& x, const std::optional<at::Tensor>& row_amax,
                  const std::optional<at::Tensor>& column_amax);
struct Product {
  int64_t m, n, k;
};
Product check_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& a_factors,
                      const at::Tensor& b, const at::Tensor& b_factors,
                      const std::optional<at::Tensor>& bias);

}  // namespace fsdp::kernels::fp8
