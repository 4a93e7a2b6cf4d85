// Which regions are open in this thread, and which modules are to be regions. The modules'
// parameters carry the key of sharded ones, whole or not, so that their use is seen
// (shard/touch.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/recompute.h"

namespace fsdp::memory {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Chosen {  // a module that is a region each time it runs
  std::string path;
  Recompute mode = Recompute::FULL;
  std::atomic<bool> kept{false};  // it cannot be run again safely; said once
  std::vector<WeakTensor> parameters = {};
};

// From now on a use of `parameter` begins a region of one of these modules, or, where there are
// none, ends the one that is open.
void watch(const at::Tensor& parameter, std::vector<std::shared_ptr<Chosen>> modules);
void unwatch(const at::Tensor& parameter);
bool is_watched(const at::Tensor& parameter);

// While the module's region is open, uses of `first` are all that must be seen of it.
void see_only(const Chosen& module, const c10::TensorImpl* first);
void see_all(const Chosen& module);

// An open region for a piece of code. Returns how many were open.
size_t open_scope(Recompute mode);
void close_scope(size_t depth);

}  // namespace fsdp::memory
