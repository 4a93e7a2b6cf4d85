#include "kernels/split.h"

#include "kernels/cpu/lanes.h"
#include "kernels/cpu/parallel.h"

namespace fsdp::kernels::cpu {

void split_float(const at::Tensor& whole, const at::Tensor& high, const at::Tensor& rest) {
  const auto* from = whole.const_data_ptr<float>();
  auto* upper = high.mutable_data_ptr<c10::BFloat16>();
  auto* lower = rest.mutable_data_ptr<int16_t>();
  const auto step = [](c10::BFloat16* h, int16_t* r, const float* w) {
    store_halves<16>(h, r, load<float>(w));
  };
  parallel(whole.numel(), [&](int64_t, int64_t begin, int64_t end) {
    over<float>(end - begin, step, upper + begin, lower + begin, from + begin);
  });
}

void join_float(const at::Tensor& high, const at::Tensor& rest, const at::Tensor& whole) {
  const auto* upper = high.const_data_ptr<c10::BFloat16>();
  const auto* lower = rest.const_data_ptr<int16_t>();
  auto* to = whole.mutable_data_ptr<float>();
  const auto step = [](float* w, const c10::BFloat16* h, const int16_t* r) {
    store<float>(w, load_halves<16>(h, r));
  };
  parallel(whole.numel(), [&](int64_t, int64_t begin, int64_t end) {
    over<float>(end - begin, step, to + begin, upper + begin, lower + begin);
  });
}

}  // namespace fsdp::kernels::cpu
