#include "train/memory_plan.h"

#include <c10/util/Exception.h>

#include <cmath>

#include "base/format.h"
#include "base/log.h"
#include "memory/shortage.h"
#include "observe/memory_check.h"
#include "observe/memory_record.h"
#include "report/shortage_page.h"
#include "train/device.h"
#include "train/memory_snapshot.h"
#include "train/plan_config.h"

namespace fsdp::train {
namespace {

constexpr int64_t kStep = 3;      // by then, states exist and the order of units is known
constexpr int kCrawls = 3;        // steps in a row
constexpr double kFarOff = 0.10;  // worth a warning

ConfigPlan plan_here(const World& world, const Config& config) {
  return plan_of(config, world.size(), gpu_of(world.device()), world.local_size());
}

}  // namespace

bool Crawling::saw(int64_t retries) {
  in_a_row_ = retries > before_ ? in_a_row_ + 1 : 0;
  before_ = retries;
  return in_a_row_ >= kCrawls;
}

bool MemoryPlan::looks() const {
  return step_ == kStep;
}

bool MemoryPlan::plans() const {
  return !training_.world.device().is_cpu() || training_.config.train.profile > 0;
}

void MemoryPlan::before_step() {
  ++step_;
  if (!looks()) return;
  profile_.emplace().begin(training_.sharded);  // on all ranks, so that their steps don't differ
  reset_peak_memory(training_.world.device());  // excludes loading
}

void MemoryPlan::after_step(Report& report) {
  if (looks()) record(report);
  const bool crawls = crawling_.saw(allocator_retries(training_.world.device()));
  if (crawls && step_ > kStep && training_.config.train.on_retries == OnRetries::kStop)
    TORCH_CHECK_WITH(OutOfMemoryError, false,
                     "the GPU's allocator had to free its cache in each "
                     "of the last ",
                     kCrawls,
                     " steps, which makes them several times slower "
                     "(train.on_retries = warn goes on)");
}

void MemoryPlan::record(Report& report) {
  profile_->end();
  observe::MemoryRecord record{.held = profile_->memory(), .world = training_.world.size()};
  profile_.reset();
  if (training_.world.rank() != 0) return;
  const at::Device device = training_.world.device();
  if (!device.is_cpu()) record.peak = peak_memory(device);
  if (plans()) {
    try {
      const ConfigPlan here = plan_here(training_.world, training_.config);
      if (here.options.gpu) record.capacity = here.options.gpu->memory;
      record.planned = plan(here.model, here.options).memory;
      const observe::Compared compared =
          observe::compare(*record.planned, record.held, record.peak);
      if (std::abs(compared.off) > kFarOff)
        log::warn(formatted("this run uses {:.0f} % {} memory than planned; see docs/memory.md.",
                            100 * std::abs(compared.off), compared.off > 0 ? "more" : "less"));
      report.line(compared.text);
    } catch (const std::exception& problem) {  // a failed plan must not end the run
      report.line(formatted("no memory plan: {}", log::plain(problem)));
    }
  }
  report.event("memory", observe::to_json(record));
}

namespace {

// Writes the page and the snapshot. Returns the page's path; "" if it can't be written.
std::string write_shortage(const World& world, const RunDirectory& directory,
                           const memory::Shortage& shortage, int64_t limit, const Error& error) {
  report::ShortageFacts facts;
  const std::string device = device_name(world.device());
  facts.run = directory.root.string();
  facts.where =
      formatted("rank {} of {}, {}", world.rank(), world.size(), device.empty() ? "CPU" : device);
  facts.problem = shortage.problem;
  facts.error = log::plain(error);
  facts.limit = limit;
  observe::MemoryRecord record{.held = shortage.held};
  if (shortage.plan) record.planned = shortage.plan->memory;
  if (!shortage.cpu) record.peak = shortage.allocated;
  for (const observe::ComparedKind& kind : observe::compared_kinds(record))
    facts.kinds.push_back({kind.name, kind.planned, kind.measured, kind.sum});
  for (const memory::Saving& saving : shortage.savings)
    facts.help.push_back({saving.what, saving.effect, saving.bytes});
  const auto snapshot = directory.memory_snapshot(world.rank());
  if (write_memory_snapshot(world.device(), snapshot)) facts.snapshot = snapshot.string();
  const auto page = directory.shortage_page(world.rank());
  report::write_page(report::shortage_page(facts), page);
  return page.string();
}

}  // namespace

Error explain_out_of_memory(const World& world, const Config& config, const Sharded& sharded,
                            const RunDirectory& directory, const std::exception& problem) {
  ConfigPlan here;
  try {
    here = plan_here(world, config);
  } catch (const std::exception&) {  // then it is explained without a plan
  }
  const memory::Shortage shortage =
      memory::find_shortage(sharded, problem, here.model, here.options);
  Error error = memory::to_error(shortage, bool(here.model));
  try {
    const int64_t limit = here.options.gpu ? here.options.gpu->memory : 0;
    const std::string page = write_shortage(world, directory, shortage, limit, error);
    return Error(error.message(), formatted("{} The same as a page: {}.", error.hint(), page));
  } catch (const std::exception&) {  // the error itself is what matters
    return error;
  }
}

}  // namespace fsdp::train
