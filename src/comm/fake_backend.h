// The fake backend: any world size in one process, for planning and dry runs.
//
// It behaves like a world in which every other rank holds the same data as this one: an all-gather
// repeats the input, a sum multiplies by the number of ranks. Nothing is sent and nothing waits. It
// accepts meta tensors: a plan trains on them.
#pragma once

#include "comm/backend.h"

namespace fsdp::comm {

class FakeBackend : public CpuBackend {
 public:
  FakeBackend(std::string name, int rank, int size)
      : CpuBackend("fake", std::move(name), rank, size, std::chrono::minutes(5)) {}
  ~FakeBackend() override { drain(); }

 private:
  void run(const Call& call) override;
};

}  // namespace fsdp::comm
