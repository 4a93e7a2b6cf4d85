// The fake backend: any world size in one process, for planning and dry runs.
//
// It answers as a world would in which every other rank holds what this one holds: an all-gather
// repeats the input, a sum multiplies by the number of ranks. Nothing is sent, nothing waits.
// Tensors of the meta device pass: a plan trains on them.
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
