// SwiGLU and GELU on the CPU. Backward computes the exponential again instead of keeping it.
#include <torch/library.h>

#include "kernels/cpu/dtypes.h"
#include "kernels/cpu/lane_math.h"
#include "kernels/cpu/parallel.h"
#include "kernels/outputs.h"

namespace fsdp::kernels::cpu {
namespace {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;

// An activation's value and derivative. Forward needs only the value; the compiler drops the other.
template <typename C>
struct Curve {
  Lanes<C> value;
  Lanes<C> slope;
};

struct Silu {
  template <typename C>
  static Curve<C> at(Lanes<C> x) {
    const Lanes<C> s = sigmoid(x);
    const Lanes<C> value = x * s;
    return {value, s + value * (1 - s)};
  }
};

struct Gelu {
  template <typename C>
  static Curve<C> at(Lanes<C> x) {
    const Normal<C> n = normal(x);
    return {x * n.cdf, n.cdf + x * n.density};
  }
};

// (1 + tanh(u)) / 2 is sigmoid(2 u).
struct TanhGelu {
  template <typename C>
  static Curve<C> at(Lanes<C> x) {
    constexpr C kLinear = 1.5957691216057308;  // 2 sqrt(2 / pi)
    constexpr C kCubic = 1.5957691216057308 * 0.044715;
    const Lanes<C> square = x * x;
    const Lanes<C> s = sigmoid(x * (square * kCubic + kLinear));
    const Lanes<C> value = x * s;
    return {value, s + value * (1 - s) * (square * (3 * kCubic) + kLinear)};
  }
};

Tensor swiglu(const Tensor& gate_up) {
  const auto [rows, width] = check_swiglu(gate_up);
  Tensor out = empty_columns(gate_up, width);
  with_dtype(gate_up.scalar_type(), [&, width = width, rows = rows]<typename T>(T) {
    using C = Compute<T>;
    const auto step = [](T* out_at, const T* gate, const T* up) {
      store<C>(out_at, Silu::at<C>(load<C>(gate)).value * load<C>(up));
    };
    parallel_rows(rows, width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* gate = read<T>(gate_up) + row * 2 * width;
        over<C>(width, step, write<T>(out) + row * width, gate, gate + width);
      }
    });
  });
  return out;
}

Two swiglu_backward(const Tensor& grad, const Tensor& gate_up, bool want_out) {
  const auto [rows, width] = check_swiglu_backward(grad, gate_up, want_out);
  Tensor grad_gate_up = empty_contiguous(gate_up), out = empty_if(want_out, grad);
  with_dtype(gate_up.scalar_type(), [&, width = width, rows = rows]<typename T>(T) {
    using C = Compute<T>;
    const auto gradients = [](T* to_gate, T* to_up, const T* grad_at, const T* gate, const T* up) {
      const auto silu = Silu::at<C>(load<C>(gate));
      const Lanes<C> g = load<C>(grad_at);
      store<C>(to_gate, g * load<C>(up) * silu.slope);
      store<C>(to_up, g * silu.value);
      return silu.value * load<C>(up);
    };
    const auto plain = [gradients](T* to_gate, T* to_up, const T* grad_at, const T* gate,
                                   const T* up) { gradients(to_gate, to_up, grad_at, gate, up); };
    const auto with_out = [gradients](T* to_gate, T* to_up, T* out_at, const T* grad_at,
                                      const T* gate, const T* up) {
      store<C>(out_at, gradients(to_gate, to_up, grad_at, gate, up));
    };
    parallel_rows(rows, width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T *gate = read<T>(gate_up) + row * 2 * width, *from = read<T>(grad) + row * width;
        T* to = write<T>(grad_gate_up) + row * 2 * width;
        if (want_out)
          over<C>(width, with_out, to, to + width, write<T>(out) + row * width, from, gate,
                  gate + width);
        else
          over<C>(width, plain, to, to + width, from, gate, gate + width);
      }
    });
  });
  return {grad_gate_up, out};
}

template <typename Activation>
void activation_forward(const Tensor& x, const Tensor& out) {
  with_dtype(x.scalar_type(), [&]<typename T>(T) {
    using C = Compute<T>;
    const auto step = [](T* to, const T* from) {
      store<C>(to, Activation::template at<C>(load<C>(from)).value);
    };
    parallel(x.numel(), [&](int64_t, int64_t begin, int64_t end) {
      over<C>(end - begin, step, write<T>(out) + begin, read<T>(x) + begin);
    });
  });
}

template <typename Activation>
void activation_backward(const Tensor& grad, const Tensor& x, const Tensor& grad_x,
                         const Tensor& out) {
  with_dtype(x.scalar_type(), [&]<typename T>(T) {
    using C = Compute<T>;
    const auto gradient = [](T* to, const T* grad_at, const T* from) {
      const auto curve = Activation::template at<C>(load<C>(from));
      store<C>(to, load<C>(grad_at) * curve.slope);
      return curve.value;
    };
    const auto plain = [gradient](T* to, const T* grad_at, const T* from) {
      gradient(to, grad_at, from);
    };
    const auto with_out = [gradient](T* to, T* out_at, const T* grad_at, const T* from) {
      store<C>(out_at, gradient(to, grad_at, from));
    };
    parallel(x.numel(), [&](int64_t, int64_t begin, int64_t end) {
      const T *grad_from = read<T>(grad) + begin, *from = read<T>(x) + begin;
      T* to = write<T>(grad_x) + begin;
      if (out.numel() > 0)
        over<C>(end - begin, with_out, to, write<T>(out) + begin, grad_from, from);
      else
        over<C>(end - begin, plain, to, grad_from, from);
    });
  });
}

Tensor gelu(const Tensor& x, bool tanh) {
  check_gelu(x, tanh);
  Tensor out = empty_contiguous(x);
  tanh ? activation_forward<TanhGelu>(x, out) : activation_forward<Gelu>(x, out);
  return out;
}

Two gelu_backward(const Tensor& grad, const Tensor& x, bool tanh, bool want_out) {
  check_gelu_backward(grad, x, tanh, want_out);
  Tensor grad_x = empty_contiguous(x), out = empty_if(want_out, x);
  tanh ? activation_backward<TanhGelu>(grad, x, grad_x, out)
       : activation_backward<Gelu>(grad, x, grad_x, out);
  return {grad_x, out};
}

}  // namespace

TORCH_LIBRARY_IMPL(fsdp, CPU, m) {
  m.impl("swiglu", swiglu);
  m.impl("swiglu_backward", swiglu_backward);
  m.impl("gelu", gelu);
  m.impl("gelu_backward", gelu_backward);
}

}  // namespace fsdp::kernels::cpu
