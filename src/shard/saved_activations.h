// Bytes that autograd keeps for backward. Each storage counts once, however many saved tensors use
// it. Parameters of sharded units don't count: backward gathers them again.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace fsdp::shard::saved_activations {

void count(bool on);  // turns counting on or off, from zero
bool counting();      // cheap: called for every saved tensor
void add(const at::Tensor& tensor);
void add(const void* storage, size_t bytes);
void remove(const void* storage);
bool holds(const void* storage);
int64_t held();  // now
int64_t peak();  // since counting began; 0 while it is off

// While alive, counts from zero; afterwards the previous count goes on. For dry runs.
class CountedApart {
 public:
  CountedApart();
  ~CountedApart();
  CountedApart(const CountedApart&) = delete;
  CountedApart& operator=(const CountedApart&) = delete;

 private:
  struct Before;
  std::unique_ptr<Before> before_;
};

// Host memory allocated for offloaded activations.
void add_host(int64_t bytes);
int64_t host();

}  // namespace fsdp::shard::saved_activations
