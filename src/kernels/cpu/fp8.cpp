// fp8 on the CPU, by emulation: the same bytes and factors as on a GPU; products in float32.
#include "kernels/fp8.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <tuple>

#include "kernels/cpu/dtypes.h"
#include "kernels/cpu/parallel.h"
#include "kernels/fp8_number.h"
#include "kernels/ops.h"

namespace fsdp::kernels::cpu {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

template <typename T>
uint32_t magnitude(T x) {
  return fp8::bits_of(static_cast<float>(x)) & 0x7fffffffu;
}

void raise(float* to, uint32_t bits) {
  std::atomic_ref<uint32_t> place(*reinterpret_cast<uint32_t*>(to));
  uint32_t now = place.load(std::memory_order_relaxed);
  while (now < bits && !place.compare_exchange_weak(now, bits, std::memory_order_relaxed)) {
  }
}

// The matrix that a source stands for.
Tensor matrix_of(const Tensor& x, const Optional& rstd, const Optional& weight, bool swiglu) {
  if (swiglu) return kernels::swiglu(x);
  if (!rstd) return x;
  const int64_t count = x.size(0), width = x.size(1);
  Tensor made = at::empty({count, width}, x.options());
  with_dtype(x.scalar_type(), [&]<typename T>(T) {
    parallel_rows(count, width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* from = read<T>(x) + row * width;
        const float by = read<float>(*rstd)[row];
        for (int64_t i = 0; i < width; ++i)
          write<T>(made)[row * width + i] = static_cast<T>(static_cast<float>(from[i]) * by *
                                                           static_cast<float>(read<T>(*weight)[i]));
      }
    });
  });
  return made;
}

std::tuple<Tensor, Tensor> fp8_amax(const Tensor& given, const Optional& rstd,
                                    const Optional& norm_weight, bool swiglu, bool rowwise,
                                    bool rows, bool columns) {
  const auto [count, width] = fp8::check_source(given, rstd, norm_weight, swiglu);
  const Tensor x = matrix_of(given, rstd, norm_weight, swiglu);
  const auto made = [&](int64_t size) {
    return at::full({size}, 0, x.options().dtype(at::kFloat));
  };
  const Tensor of_rows = made(rowwise ? (rows ? count : 0) : 1),
               of_columns = made(rowwise && columns ? width : 0);
  with_dtype(x.scalar_type(), [&, width = width, count = count]<typename T>(T) {
    // In larger blocks than usual: each ends with a write to all columns.
    parallel_rows(count, width / 16, [&](int64_t begin, int64_t end) {
      std::vector<uint32_t> most(static_cast<size_t>(width), 0);  // of each column
      for (int64_t row = begin; row < end; ++row) {
        const T* from = read<T>(x) + row * width;
        uint32_t own = 0;
        for (int64_t i = 0; i < width; ++i) {
          const uint32_t bits = magnitude(from[i]);
          own = std::max(own, bits);
          most[static_cast<size_t>(i)] = std::max(most[static_cast<size_t>(i)], bits);
        }
        if (!rowwise || rows) raise(write<float>(of_rows) + (rowwise ? row : 0), own);
      }
      if (rowwise && columns)
        for (int64_t i = 0; i < width; ++i)
          raise(write<float>(of_columns) + i, most[static_cast<size_t>(i)]);
    });
  });
  return {of_rows, of_columns};
}

std::vector<fp8::Factors> factors_for(const Optional& amax, int64_t rows, bool e5m2) {
  std::vector<fp8::Factors> factors;
  if (!amax) return factors;
  const auto* from = read<float>(*amax);
  for (int64_t i = 0; i < rows; ++i)
    factors.push_back(fp8::factors_of(from[amax->numel() == 1 ? 0 : i], e5m2));
  return factors;
}

Tensor restoring(const Optional& amax, bool e5m2) {
  const Tensor factors = at::empty({amax ? amax->numel() : 0}, at::TensorOptions(at::kFloat));
  for (int64_t i = 0; i < factors.numel(); ++i)
    write<float>(factors)[i] = fp8::factors_of(read<float>(*amax)[i], e5m2).restore;
  return factors;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fp8_cast(const Tensor& given, const Optional& rstd,
                                                    const Optional& norm_weight, bool swiglu,
                                                    const Optional& row_amax,
                                                    const Optional& column_amax, bool e5m2) {
  const auto [count, width] = fp8::check_source(given, rstd, norm_weight, swiglu);
  fp8::check_magnitudes({count, width}, given, row_amax, column_amax);
  const Tensor x = matrix_of(given, rstd, norm_weight, swiglu);
  const auto options = x.options().dtype(e5m2 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn);
  const Tensor rows = row_amax ? at::empty({count, width}, options) : at::empty({0}, options);
  const Tensor columns = column_amax ? at::empty({width, count}, options) : at::empty({0}, options);
  const auto of_rows = factors_for(row_amax, count, e5m2),
             of_columns = factors_for(column_amax, width, e5m2);
  auto* to_rows = static_cast<uint8_t*>(rows.mutable_data_ptr());
  auto* to_columns = static_cast<uint8_t*>(columns.mutable_data_ptr());
  with_dtype(x.scalar_type(), [&, width = width, count = count]<typename T>(T) {
    parallel_rows(count, width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* from = read<T>(x) + row * width;
        for (int64_t i = 0; i < width; ++i) {
          const auto value = static_cast<float>(from[i]);
          if (row_amax)
            to_rows[row * width + i] =
                fp8::encode(value * of_rows[static_cast<size_t>(row)].multiply, e5m2);
          if (column_amax)
            to_columns[i * count + row] =
                fp8::encode(value * of_columns[static_cast<size_t>(i)].multiply, e5m2);
        }
      }
    });
  });
  return {rows, restoring(row_amax, e5m2), columns, restoring(column_amax, e5m2)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fp8_quantise(const Tensor& x, bool rowwise, bool rows,
                                                        bool columns, bool e5m2) {
  const auto [row_amax, column_amax] = fp8_amax(x, {}, {}, false, rowwise, rows, columns);
  const Tensor& other = rowwise ? column_amax : row_amax;
  return fp8_cast(x, {}, {}, false, rows ? Optional(row_amax) : std::nullopt,
                  columns ? Optional(other) : std::nullopt, e5m2);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> fp8_rms_norm(const Tensor& x,
                                                                const Optional& residual,
                                                                const Tensor& weight, double eps,
                                                                bool rowwise) {
  const Normed made = kernels::rms_norm(x, residual.value_or(Tensor()), weight, eps);
  const Tensor whole = made.out.view({-1, made.out.size(-1)});
  const Tensor amax = std::get<0>(fp8_amax(whole, {}, {}, false, rowwise, true, false));
  auto [rows, factors, none, no_factors] = fp8_cast(whole, {}, {}, false, amax, {}, false);
  return {rows, made.sum, made.rstd, factors, amax};
}

// A tensor's largest magnitude, [1].
Tensor amax_of_all(const Tensor& x) {
  const Tensor most = at::full({1}, 0, x.options().dtype(at::kFloat));
  with_dtype(x.scalar_type(), [&]<typename T>(T) {
    parallel(x.numel(), [&](int64_t, int64_t begin, int64_t end) {
      uint32_t own = 0;
      for (int64_t i = begin; i < end; ++i) own = std::max(own, magnitude(read<T>(x)[i]));
      raise(write<float>(most), own);
    });
  });
  return most;
}

std::tuple<Tensor, Tensor, Tensor> fp8_rms_norm_backward(const Tensor& grad,
                                                         const Optional& grad_sum, const Tensor& x,
                                                         const Tensor& rstd, const Tensor& weight,
                                                         const Optional& grad_weight,
                                                         bool accumulate, bool want_out) {
  auto made = kernels::rms_norm_backward(grad, grad_sum.value_or(Tensor()), x, rstd, weight,
                                         grad_weight.value_or(Tensor()), accumulate, want_out);
  const Tensor amax = amax_of_all(made.x);
  return {std::move(made.x), std::move(made.out), amax};
}

std::tuple<Tensor, Tensor> fp8_swiglu_backward(const Tensor& grad, const Tensor& gate_up) {
  const Tensor made = std::get<0>(kernels::swiglu_backward(grad, gate_up, false));
  return {made, amax_of_all(made)};
}

std::tuple<Tensor, Tensor> fp8_rope_pack(const Tensor& q, const Tensor& k, const Tensor& v,
                                         const Tensor& cos, const Tensor& sin) {
  const Tensor made = kernels::rope_pack(q, k, v, cos, sin);
  return {made, amax_of_all(made)};
}

// The numbers that bytes stand for.
Tensor restored(const Tensor& bytes, const Tensor& factors) {
  const bool e5m2 = bytes.scalar_type() == at::kFloat8_e5m2;
  std::array<float, 256> numbers;
  for (int code = 0; code < 256; ++code)
    numbers[static_cast<size_t>(code)] = fp8::decode(static_cast<uint8_t>(code), e5m2);
  const int64_t count = bytes.size(0), width = bytes.size(1), stride = bytes.stride(0);
  Tensor made = at::empty({count, width}, at::TensorOptions(at::kFloat));
  const auto* from = static_cast<const uint8_t*>(bytes.const_data_ptr());
  parallel_rows(count, width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float factor = read<float>(factors)[factors.numel() == 1 ? 0 : row];
      for (int64_t i = 0; i < width; ++i)
        write<float>(made)[row * width + i] = numbers[from[row * stride + i]] * factor;
    }
  });
  return made;
}

Tensor fp8_mm(const Tensor& a, const Tensor& a_factors, const Tensor& b, const Tensor& b_factors,
              const Optional& bias, at::ScalarType type, bool) {
  Tensor out = at::empty({a.size(0), b.size(0)}, at::TensorOptions(at::kFloat));
  const Optional whole = bias && bias->defined() ? Optional(bias->to(at::kFloat)) : std::nullopt;
  fp8::check_product(out, a, a_factors, b, b_factors, whole);
  const Tensor left = restored(a, a_factors), right = restored(b, b_factors).t();
  if (whole)
    at::addmm_out(out, *whole, left, right);
  else
    at::mm_out(out, left, right);
  return out.to(type);
}

void fp8_mm_into(const Tensor& out, const Tensor& a, const Tensor& a_factors, const Tensor& b,
                 const Tensor& b_factors, bool accumulate) {
  fp8::check_product(out, a, a_factors, b, b_factors, {});
  const Tensor left = restored(a, a_factors), right = restored(b, b_factors).t();
  if (!accumulate)
    out.copy_(at::mm(left, right));
  else if (out.scalar_type() == at::kFloat)
    Tensor(out).addmm_(left, right);
  else
    out.copy_(at::addmm(out.to(at::kFloat), left, right));
}

}  // namespace

TORCH_LIBRARY_IMPL(fsdp, CPU, m) {
  m.impl("fp8_amax", fp8_amax);
  m.impl("fp8_cast", fp8_cast);
  m.impl("fp8_quantise", fp8_quantise);
  m.impl("fp8_rms_norm", fp8_rms_norm);
  m.impl("fp8_rms_norm_backward", fp8_rms_norm_backward);
  m.impl("fp8_swiglu_backward", fp8_swiglu_backward);
  m.impl("fp8_rope_pack", fp8_rope_pack);
  m.impl("fp8_mm", fp8_mm);
  m.impl("fp8_mm_into", fp8_mm_into);
}

}  // namespace fsdp::kernels::cpu
