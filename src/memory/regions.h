// The regions open in this thread, and the modules that become regions. The modules' parameters
// carry the dispatch key of sharded parameters, sharded or not, so that each use is observed
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
  std::atomic<bool> kept{false};  // can't be replayed safely; logged once
  std::vector<WeakTensor> parameters = {};
};

// From now on a use of `parameter` opens a region of one of these modules; if there are none, it
// closes the open region.
void watch(const at::Tensor& parameter, std::vector<std::shared_ptr<Chosen>> modules);
void unwatch(const at::Tensor& parameter);
bool is_watched(const at::Tensor& parameter);

// While the module's region is open, only uses of `first` must be observed; see_all() undoes this.
void see_only(const Chosen& module, const c10::TensorImpl* first);
void see_all(const Chosen& module);

// Opens a region for a piece of code. Returns how many were open before.
size_t open_scope(Recompute mode);
void close_scope(size_t depth);

}  // namespace fsdp::memory
