// The work of a traced step, piece by piece: what ran when, for which unit, in which pass.
//
// On a GPU a piece is a kernel or a copy. On the CPU it is a stretch in which an operator ran and
// none that it called; small operators without a family of their own count for their caller.
#pragma once

#include <string>
#include <vector>

#include "observe/families.h"
#include "observe/step_trace.h"

namespace fsdp::observe {

enum class StepPass { kNone, kForward, kBackward, kUpdate };

struct WorkPiece {
  int64_t begin = 0, end = 0;
  Family family = Family::kOther;
  StepPass pass = StepPass::kNone;
  bool gather = false;  // communication: of parameters, not of gradients
  bool first = true;    // of its operator; counts as a call
  std::string unit;     // "": none
  std::string name;
};

struct StepWork {
  int64_t begin = 0, end = 0;  // of the step
  bool gpu = false;
  double flops = 0;               // of all products
  std::vector<WorkPiece> pieces;  // by begin
  struct Phase {
    StepPass pass;
    int64_t begin, end;
  };
  std::vector<Phase> phases;  // of the host; several forwards and backwards with micro-batches
};

// Spans outside of the scope "step N" are left out; without that scope, all are the step.
StepWork work_of(const StepTrace& trace);

}  // namespace fsdp::observe
