// Which regions are open in this thread, and which modules are to be regions. The modules'
// parameters carry the key of sharded ones, whole or not, so that their use is seen
// (shard/touch.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::memory {

struct Chosen {  // a module that is a region each time it runs
  std::string path;
  bool selective = false;
  std::atomic<bool> kept{false};  // it cannot be run again safely; said once
};

// From now on a use of `parameter` begins a region of one of these modules, or, where there are
// none, ends the one that is open.
void watch(const at::Tensor& parameter, std::vector<std::shared_ptr<Chosen>> modules);
void unwatch(const at::Tensor& parameter);

// An open region for a piece of code. Returns how many were open.
size_t open_scope(bool selective);
void close_scope(size_t depth);

}  // namespace fsdp::memory
