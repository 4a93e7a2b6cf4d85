// What autograd keeps for backward, in bytes: every storage once, however many saved tensors lie in
// it. Parameters of sharded units are left out: backward gathers them again.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::shard::saved_activations {

void count(bool on);  // begins at zero
bool counting();      // cheap: asked for every saved tensor
void add(const at::Tensor& tensor);
void add(const void* storage, size_t bytes);
void remove(const void* storage);
bool holds(const void* storage);
int64_t held();  // now
int64_t peak();  // since counting began; 0 where it never did

// Host memory that offloaded ones lie in, or did.
void add_host(int64_t bytes);
int64_t host();

}  // namespace fsdp::shard::saved_activations
