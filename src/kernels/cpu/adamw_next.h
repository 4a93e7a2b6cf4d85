// AdamW's arithmetic, for lanes of any type.
#pragma once

#include "kernels/cpu/registers.h"

namespace fsdp::kernels::cpu {

// Returns the new parameters; updates the states in place.
template <typename V, typename Numbers, typename Root>
FSDP_INLINE V adamw_next(V w, V g, V& m, V& v, const Numbers& k, const Root& square_root) {
  m = m * k.beta1 + g * k.rest1;
  v = v * k.beta2 + g * g * k.rest2;
  return w * k.keep - k.size * m / (square_root(v) * k.correction + k.eps);
}

}  // namespace fsdp::kernels::cpu
