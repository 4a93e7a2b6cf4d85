// oneDNN, with which LibTorch computes on CPUs, can list the code that it generates in
// /tmp/perf-PID.map, for Linux perf, and leaves the file there: one of each process. Whether it
// does so by default depends on its build. ONEDNN_JIT_PROFILE=0 turns that off. oneDNN reads the
// variable at its first operation, so libfsdp sets it when it is loaded, unless the user has set
// it.
#pragma once

#include "base/namespace.h"

namespace fsdp::base {

inline constexpr const char* kJitProfileVariable = "ONEDNN_JIT_PROFILE";

// Whether libfsdp set the variable when it was loaded.
bool jit_profile_was_turned_off();

}  // namespace fsdp::base
