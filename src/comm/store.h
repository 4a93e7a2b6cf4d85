// Small uses of a c10d store: waiting for other ranks in a way that can say who is missing.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

#include "comm/shm/group.h"

namespace fsdp::comm {

using Store = c10::intrusive_ptr<c10d::Store>;

// Waits until key PREFIX/r is set for every r below `size`; Error names the ranks that are missing.
// `what` begins the message: "rank 0: joining the world".
void await_ranks(c10d::Store& store, const std::string& prefix, int size,
                 std::chrono::milliseconds timeout, const std::string& what);

shm::Exchange exchange_over(Store store, const std::string& what);

}  // namespace fsdp::comm
