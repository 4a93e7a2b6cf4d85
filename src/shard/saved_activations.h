// What autograd keeps for backward, in bytes: every storage once, however many saved tensors lie in
// it. Parameters of sharded units are left out: backward gathers them again.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace fsdp::shard::saved_activations {

void count(bool on);  // begins, and ends, at zero
bool counting();      // cheap: asked for every saved tensor
void add(const at::Tensor& tensor);
void add(const void* storage, size_t bytes);
void remove(const void* storage);
bool holds(const void* storage);
int64_t held();  // now
int64_t peak();  // since counting began; 0 where nobody counts

// While alive, counting begins anew; then it goes on as it was. For dry runs.
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

// Host memory that offloaded ones lie in, or did.
void add_host(int64_t bytes);
int64_t host();

}  // namespace fsdp::shard::saved_activations
