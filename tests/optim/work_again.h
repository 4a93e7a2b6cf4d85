// A stand-in for a CUDA graph, for tests without a GPU: a replay repeats the recorded work. Its
// inputs must stay at the addresses they had when it was recorded.
#pragma once

#include <functional>
#include <memory>

#include "fsdp/error.h"
#include "shard/capture.h"

namespace fsdp::testing {

class WorkAgain : public shard::StepGraph {
 public:
  static inline bool refuses = false;  // to record anything

  static void install() {
    refuses = false;
    shard::step_graphs_of_tests = [] { return std::make_unique<WorkAgain>(); };
  }
  static void remove() { shard::step_graphs_of_tests = {}; }

  void record(const std::function<void()>& work) override {
    if (refuses) throw Error("somebody looks at the device.", "do not.");
    work_ = work;
  }
  void replay() override { work_(); }

 private:
  std::function<void()> work_;
};

}  // namespace fsdp::testing
