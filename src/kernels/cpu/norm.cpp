// RMSNorm and LayerNorm on the CPU. A row is read from memory once; later passes find it in the
// cache. The two differ in whether rows are centred (their mean subtracted).
//
// A parameter's gradient is a sum over rows. Each block of rows computes its own part, and the
// parts are added in order; block boundaries depend only on the number of rows.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "kernels/cpu/dtypes.h"
#include "kernels/cpu/lane_math.h"
#include "kernels/cpu/parallel.h"
#include "kernels/outputs.h"

namespace fsdp::kernels::cpu {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;
using Two = std::tuple<Tensor, Tensor>;

template <typename C>
struct Moments {
  C mean;  // 0 unless centred
  C rstd;
};

template <bool centred, typename C, typename T>
Lanes<C> normalised(const T* x, const Moments<C>& row) {
  if constexpr (centred)
    return (load<C>(x) - row.mean) * row.rstd;
  else
    return load<C>(x) * row.rstd;
}

// Writes a row of the result. Not inlined, so that forward and backward, which may be asked to
// write it again, compute the same bits.
template <bool centred, typename T>
[[gnu::noinline]] void write_out(T* out, const T* x, const Moments<Compute<T>>& moments,
                                 const T* weight, const T* bias, int64_t dim) {
  using C = Compute<T>;
  const auto row = moments;
  const auto plain = [row](T* to, const T* x_at, const T* w_at) {
    store<C>(to, normalised<centred, C>(x_at, row) * load<C>(w_at));
  };
  const auto biased = [row](T* to, const T* x_at, const T* w_at, const T* b_at) {
    store<C>(to, normalised<centred, C>(x_at, row) * load<C>(w_at) + load<C>(b_at));
  };
  if (bias != nullptr)
    over<C>(dim, biased, out, x, weight, bias);
  else
    over<C>(dim, plain, out, x, weight);
}

template <bool centred, typename T>
Moments<Compute<T>> moments(const T* x, int64_t dim, Compute<T> eps) {
  using C = Compute<T>;
  Moments<C> row{0, 0};
  if constexpr (centred) {
    const auto value = [](const T* at) { return Sums<C, 1>{{load<C>(at)}}; };
    row.mean = sums_over<C, 1>(dim, value, x).total(0) / static_cast<C>(dim);
  }
  const auto square = [mean = row.mean](const T* at) {
    Lanes<C> value = load<C>(at);
    if constexpr (centred) value -= mean;
    return Sums<C, 1>{{value * value}};
  };
  const C mean_square = sums_over<C, 1>(dim, square, x).total(0) / static_cast<C>(dim);
  row.rstd = 1 / std::sqrt(mean_square + eps);
  return row;
}

template <typename T>
void add_rows(T* sum, const T* x, const T* residual, int64_t dim) {
  using C = Compute<T>;
  const auto add = [](T* to, const T* x_at, const T* r_at) {
    store<C>(to, load<C>(x_at) + load<C>(r_at));
  };
  over<C>(dim, add, sum, x, residual);
}

struct Forward {
  Tensor x, residual, weight, bias;
  double eps;
  Tensor out, sum, mean, rstd;
};

template <bool centred, typename T>
void norm_forward(const Forward& t, const RowSizes& size) {
  using C = Compute<T>;
  const int64_t dim = size.dim;
  const T *x = read<T>(t.x), *residual = read<T>(t.residual);
  const T *weight = read<T>(t.weight), *bias = read<T>(t.bias);
  T *out = write<T>(t.out), *sum = write<T>(t.sum);
  C *mean = write<C>(t.mean), *rstd = write<C>(t.rstd);
  parallel_rows(size.rows, dim, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * dim;
      const T* from = residual != nullptr ? sum + at : x + at;
      if (residual != nullptr) add_rows(sum + at, x + at, residual + at, dim);
      const auto found = moments<centred>(from, dim, static_cast<C>(t.eps));
      if constexpr (centred) mean[row] = found.mean;
      rstd[row] = found.rstd;
      write_out<centred>(out + at, from, found, weight, bias, dim);
    }
  });
}

// The sums over rows that become a parameter's gradient: one row of memory per block of rows.
template <typename C>
class Parts {
 public:
  Parts(const RowSizes& size, const Tensor& like)
      : rows_(size.rows),
        dim_(size.dim),
        block_(std::max<int64_t>(16, (rows_ + 63) / 64)),
        blocks_((rows_ + block_ - 1) / block_),
        memory_(at::empty({blocks_, dim_}, like.options().dtype(row_type(like.scalar_type())))) {}

  // Calls body(block, begin, end) for every block of rows.
  template <typename Body>
  void over_blocks(const Body& body) const {
    parallel_tasks(blocks_, [&](int64_t block) {
      body(block, block * block_, std::min(rows_, (block + 1) * block_));
    });
  }

  // A block's memory, zeroed.
  C* clear(int64_t block) const {
    C* part = write<C>(memory_) + block * dim_;
    std::fill(part, part + dim_, C(0));
    return part;
  }

  // Writes the sums into `target`, or adds them to it.
  void put(const Tensor& target, bool accumulate) const {
    with_dtype(target.scalar_type(), [&]<typename G>(G) {
      parallel_tasks((dim_ + kColumns - 1) / kColumns, [&](int64_t task) {
        const int64_t begin = task * kColumns;
        put_columns(write<G>(target) + begin, begin, std::min(kColumns, dim_ - begin), accumulate);
      });
    });
  }

 private:
  static constexpr int64_t kColumns = 256;

  template <typename G>
  void put_columns(G* target, int64_t begin, int64_t count, bool accumulate) const {
    C sum[kColumns] = {};
    const auto add = [](C* to, const C* part) { store<C>(to, load<C>(to) + load<C>(part)); };
    for (int64_t block = 0; block < blocks_; ++block)
      over<C>(count, add, sum, read<C>(memory_) + block * dim_ + begin);
    const auto put = [](G* to, const C* from) { store<C>(to, load<C>(from)); };
    const auto put_onto = [](G* to, const C* from) { store<C>(to, load<C>(to) + load<C>(from)); };
    if (accumulate)
      over<C>(count, put_onto, target, static_cast<const C*>(sum));
    else
      over<C>(count, put, target, static_cast<const C*>(sum));
  }

  int64_t rows_, dim_, block_, blocks_;
  Tensor memory_;
};

// One row of the arrays of backward.
template <typename T>
struct BackwardRow {
  const T *grad, *grad_sum, *x, *weight;
  T* grad_x;
  Compute<T>*grad_weight, *grad_bias;  // sums that the row is added to; grad_bias only if centred
};

template <bool centred, typename T>
void backward_row(const BackwardRow<T>& t, const Moments<Compute<T>>& moments, int64_t dim) {
  using C = Compute<T>;
  const auto row = moments;
  // First the sums over the whole row: its gradient's components along x and, if centred, along 1.
  C along, average = 0;
  if constexpr (centred) {
    const auto look = [row](const T* g_at, const T* x_at, const T* w_at, C* gw, C* gb) {
      const Lanes<C> g = load<C>(g_at), x_hat = normalised<true, C>(x_at, row);
      store<C>(gw, load<C>(gw) + g * x_hat);
      store<C>(gb, load<C>(gb) + g);
      const Lanes<C> scaled = g * load<C>(w_at);
      return Sums<C, 2>{{scaled * x_hat, scaled}};
    };
    const auto sums = sums_over<C, 2>(dim, look, t.grad, t.x, t.weight, t.grad_weight, t.grad_bias);
    along = sums.total(0) / static_cast<C>(dim);
    average = sums.total(1) / static_cast<C>(dim);
  } else {
    const auto look = [row](const T* g_at, const T* x_at, const T* w_at, C* gw) {
      const Lanes<C> g = load<C>(g_at), x_hat = normalised<false, C>(x_at, row);
      store<C>(gw, load<C>(gw) + g * x_hat);
      return Sums<C, 1>{{g * load<C>(w_at) * x_hat}};
    };
    const auto sums = sums_over<C, 1>(dim, look, t.grad, t.x, t.weight, t.grad_weight);
    along = sums.total(0) / static_cast<C>(dim);
  }
  const auto gradient = [=](const T* g_at, const T* x_at, const T* w_at) {
    Lanes<C> g = load<C>(g_at) * load<C>(w_at) - normalised<centred, C>(x_at, row) * along;
    if constexpr (centred) g -= average;
    return g * row.rstd;
  };
  const auto plain = [gradient](T* to, const T* g_at, const T* x_at, const T* w_at) {
    store<C>(to, gradient(g_at, x_at, w_at));
  };
  const auto added = [gradient](T* to, const T* g_at, const T* x_at, const T* w_at, const T* more) {
    store<C>(to, gradient(g_at, x_at, w_at) + load<C>(more));
  };
  if (t.grad_sum != nullptr)
    over<C>(dim, added, t.grad_x, t.grad, t.x, t.weight, t.grad_sum);
  else
    over<C>(dim, plain, t.grad_x, t.grad, t.x, t.weight);
}

struct Backward {
  Tensor grad, grad_sum, x, mean, rstd, weight, bias, grad_weight, grad_bias;
  bool accumulate;
  Tensor grad_x, out;  // out: undefined if it isn't wanted
};

template <bool centred, typename T>
void norm_backward(const Backward& t, const RowSizes& size) {
  using C = Compute<T>;
  const int64_t dim = size.dim;
  const T *grad = read<T>(t.grad), *grad_sum = read<T>(t.grad_sum), *x = read<T>(t.x);
  const T *weight = read<T>(t.weight), *bias = read<T>(t.bias);
  const C *mean = read<C>(t.mean), *rstd = read<C>(t.rstd);
  T *grad_x = write<T>(t.grad_x), *out = write<T>(t.out);
  const Parts<C> weights(size, t.x), biases(centred ? size : RowSizes{size.rows, 0}, t.x);
  weights.over_blocks([&](int64_t block, int64_t begin, int64_t end) {
    C *grad_weight = weights.clear(block), *grad_bias = biases.clear(block);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * dim;
      const Moments<C> found{centred ? mean[row] : C(0), rstd[row]};
      const T* more = grad_sum != nullptr ? grad_sum + at : nullptr;
      backward_row<centred, T>(
          {grad + at, more, x + at, weight, grad_x + at, grad_weight, grad_bias}, found, dim);
      if (out != nullptr) write_out<centred>(out + at, x + at, found, weight, bias, dim);
    }
  });
  if (t.grad_weight.defined()) weights.put(t.grad_weight, t.accumulate);
  if (t.grad_bias.defined()) biases.put(t.grad_bias, t.accumulate);
}

// --- the operators ---

std::tuple<Tensor, Tensor, Tensor> rms_norm(const Tensor& x, const Optional& residual,
                                            const Tensor& weight, double eps) {
  const RowSizes size = check_rms_norm(x, residual, weight, eps);
  const Tensor added = or_undefined(residual);
  const Forward t{.x = x,
                  .residual = added,
                  .weight = weight,
                  .eps = eps,
                  .out = empty_contiguous(x),
                  .sum = empty_if(added.defined(), x),
                  .rstd = empty_rows(x)};
  with_dtype(x.scalar_type(), [&]<typename T>(T) { norm_forward<false, T>(t, size); });
  return {t.out, t.sum, t.rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const Optional& residual,
                                                      const Tensor& weight, const Optional& bias,
                                                      double eps) {
  const RowSizes size = check_layer_norm(x, residual, weight, bias, eps);
  const Tensor added = or_undefined(residual);
  const Forward t{.x = x,
                  .residual = added,
                  .weight = weight,
                  .bias = or_undefined(bias),
                  .eps = eps,
                  .out = empty_contiguous(x),
                  .sum = empty_if(added.defined(), x),
                  .mean = empty_rows(x),
                  .rstd = empty_rows(x)};
  with_dtype(x.scalar_type(), [&]<typename T>(T) { norm_forward<true, T>(t, size); });
  return {t.out, t.sum, t.mean, t.rstd};
}

template <bool centred>
Two run_backward(const Backward& t, const RowSizes& size) {
  with_dtype(t.x.scalar_type(), [&]<typename T>(T) { norm_backward<centred, T>(t, size); });
  return {t.grad_x, t.out.defined() ? t.out : no_output(t.x)};
}

Two rms_norm_backward(const Tensor& grad, const Optional& grad_sum, const Tensor& x,
                      const Tensor& rstd, const Tensor& weight, const Optional& grad_weight,
                      bool accumulate, bool want_out) {
  const RowSizes size =
      check_rms_norm_backward(grad, grad_sum, x, rstd, weight, grad_weight, accumulate, want_out);
  return run_backward<false>({.grad = grad,
                              .grad_sum = or_undefined(grad_sum),
                              .x = x,
                              .rstd = rstd,
                              .weight = weight,
                              .grad_weight = or_undefined(grad_weight),
                              .accumulate = accumulate,
                              .grad_x = empty_contiguous(x),
                              .out = want_out ? empty_contiguous(x) : Tensor()},
                             size);
}

Two layer_norm_backward(const Tensor& grad, const Optional& grad_sum, const Tensor& x,
                        const Tensor& mean, const Tensor& rstd, const Tensor& weight,
                        const Optional& bias, const Optional& grad_weight,
                        const Optional& grad_bias, bool accumulate, bool want_out) {
  const RowSizes size = check_layer_norm_backward(grad, grad_sum, x, mean, rstd, weight, bias,
                                                  grad_weight, grad_bias, accumulate, want_out);
  return run_backward<true>({.grad = grad,
                             .grad_sum = or_undefined(grad_sum),
                             .x = x,
                             .mean = mean,
                             .rstd = rstd,
                             .weight = weight,
                             .bias = or_undefined(bias),
                             .grad_weight = or_undefined(grad_weight),
                             .grad_bias = or_undefined(grad_bias),
                             .accumulate = accumulate,
                             .grad_x = empty_contiguous(x),
                             .out = want_out ? empty_contiguous(x) : Tensor()},
                            size);
}

}  // namespace

TORCH_LIBRARY_IMPL(fsdp, CPU, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("layer_norm", layer_norm);
  m.impl("rms_norm_backward", rms_norm_backward);
  m.impl("layer_norm_backward", layer_norm_backward);
}

}  // namespace fsdp::kernels::cpu
