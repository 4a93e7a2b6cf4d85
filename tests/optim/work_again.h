// A stand-in for a CUDA graph, for tests without a GPU: a replay repeats the recorded work. Its
// inputs must stay at the addresses they had when it was recorded.
#pragma once

#include <functional>
#include <memory>

#include "base/seams.h"
#include "fsdp/error.h"
#include "shard/capture.h"

namespace fsdp::testing {

class WorkAgain : public shard::StepGraph {
 public:
  static inline bool refuses = false;  // to record anything

  // Graphs are made of these.
  static Seams seams() {
    refuses = false;
    return {.graphs = [] { return std::make_unique<WorkAgain>(); }};
  }

  void record(const std::function<void()>& work) override {
    if (refuses) throw Error("somebody looks at the device.", "do not.");
    work_ = work;
  }
  void replay() override { work_(); }

 private:
  std::function<void()> work_;
};

}  // namespace fsdp::testing
