#include "base/jit_profile.h"

#include <cstdlib>

namespace fsdp::base {
namespace {

bool turn_jit_profile_off() {
  // The name of older versions counts, too.
  return !std::getenv(kJitProfileVariable) && !std::getenv("DNNL_JIT_PROFILE") &&
         setenv(kJitProfileVariable, "0", /*overwrite=*/0) == 0;
}

const bool turned_off = turn_jit_profile_off();  // at load time, before any operator

}  // namespace

bool jit_profile_was_turned_off() {
  return turned_off;
}

}  // namespace fsdp::base
