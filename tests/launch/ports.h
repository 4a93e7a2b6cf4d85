// Ports for tests: free now, and not held.
#pragma once

#include "launch/connection.h"

namespace fsdp::launch {

inline int free_port() {
  return HeldPort(0, "a test's port").number();
}

}  // namespace fsdp::launch
