#include "train/memory_plan.h"

#include <cmath>

#include "base/format.h"
#include "base/log.h"
#include "fsdp/out_of_memory.h"
#include "observe/memory_check.h"
#include "train/device.h"
#include "train/plan_config.h"

namespace fsdp::train {
namespace {

constexpr int64_t kStep = 3;      // by then, states exist and the order of units is known
constexpr double kFarOff = 0.10;  // worth a warning

ConfigPlan plan_here(const World& world, const Config& config) {
  return plan_of(config, world.size(), gpu_of(world.device()), world.local_size());
}

}  // namespace

bool MemoryPlan::looks() const {
  const World& world = training_.world;
  return step_ == kStep && (!world.device().is_cpu() || training_.config.train.profile > 0);
}

void MemoryPlan::before_step() {
  ++step_;
  if (!looks()) return;
  profile_.emplace().begin(training_.sharded);  // on all ranks, so that their steps don't differ
  reset_peak_memory(training_.world.device());  // excludes loading
}

std::string MemoryPlan::after_step() {
  if (!looks()) return "";
  profile_->end();
  const MemoryReport held = profile_->memory();
  profile_.reset();
  if (training_.world.rank() != 0) return "";
  at::Device device = training_.world.device();
  std::optional<int64_t> peak;
  if (!device.is_cpu()) peak = peak_memory(device);
  try {
    ConfigPlan here = plan_here(training_.world, training_.config);
    observe::Compared compared =
        observe::compare(plan(here.model, here.options).memory, held, peak);
    if (std::abs(compared.off) > kFarOff)
      log::warn(formatted("this run uses {:.0f} % {} memory than planned; see docs/memory.md.",
                          100 * std::abs(compared.off), compared.off > 0 ? "more" : "less"));
    return compared.text;
  } catch (const std::exception& problem) {  // a failed plan must not end the run
    return formatted("no memory plan: {}", problem.what());
  }
}

Error explain_out_of_memory(const World& world, const Config& config, const Sharded& sharded,
                            const std::exception& problem) {
  try {
    ConfigPlan here = plan_here(world, config);
    return fsdp::explain_out_of_memory(sharded, problem, here.model, here.options);
  } catch (const std::exception&) {
    return fsdp::explain_out_of_memory(sharded, problem);
  }
}

}  // namespace fsdp::train
