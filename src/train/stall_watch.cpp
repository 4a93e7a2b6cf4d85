#include "train/stall_watch.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <vector>

#include "base/format.h"
#include "base/log.h"
#include "base/rank_status.h"
#include "base/regular_file.h"
#include "base/stacks.h"
#include "comm/core/flight_recorder.h"

namespace fsdp::train {
namespace {

constexpr size_t kRecentSteps = 64;
constexpr size_t kFewestSteps = 10;  // the first ones are slow, and a graph is captured after them
constexpr size_t kBriefFrames = 4;
constexpr auto kCollectiveTick = std::chrono::seconds(1);

std::string in_seconds(double seconds) {
  return formatted("{:.{}f} s", seconds, seconds < 10 ? 2 : 0);
}

}  // namespace

void StepHistory::add(double seconds) {
  recent_.push_back(seconds);
  if (recent_.size() > kRecentSteps) recent_.pop_front();
}

double StepHistory::usual_s() const {
  if (recent_.empty()) return 0;
  std::vector<double> sorted(recent_.begin(), recent_.end());
  const auto nine_of_ten = sorted.begin() + static_cast<ptrdiff_t>((sorted.size() - 1) * 9 / 10);
  std::nth_element(sorted.begin(), nine_of_ten, sorted.end());
  return *nine_of_ten;
}

std::optional<double> StepHistory::limit_s() const {
  if (factor_ <= 0 || recent_.size() < kFewestSteps) return std::nullopt;
  return std::max(least_s_, factor_ * usual_s());
}

StallWatch::StallWatch(StepHistory history, std::function<void(const Stall&)> report)
    : report_(std::move(report)), history_(std::move(history)) {
  // No signal of the program is handled on this thread.
  sigset_t all, kept;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &kept);
  thread_ = std::thread([this] { watch(); });
  pthread_sigmask(SIG_SETMASK, &kept, nullptr);
}

StallWatch::~StallWatch() {
  {
    Lock lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();  // Ends: it sees `closing_`
}

void StallWatch::begin_step(int64_t step) {
  const auto now = Clock::now();
  Lock lock(mutex_);
  if (step_ > 0) history_.add(std::chrono::duration<double>(now - begun_).count());
  // The thread sleeps until the deadline that it knows; only a first step must wake it.
  const bool asleep = step_ == 0;
  step_ = step;
  begun_ = now;
  ++changes_;
  if (asleep) changed_.notify_all();
}

void StallWatch::pause() {
  Lock lock(mutex_);
  if (step_ > 0) history_.add(std::chrono::duration<double>(Clock::now() - begun_).count());
  step_ = 0;
  ++changes_;
}

void StallWatch::watch() {
  pthread_setname_np(pthread_self(), "fsdp-stall");
  uint64_t reported = 0;  // the change whose step has been reported
  Lock lock(mutex_);
  while (!closing_) {
    const auto limit_s = history_.limit_s();
    if (step_ == 0 || changes_ == reported) {
      // A step that was reported is over when the next one begins, which nobody announces.
      if (step_ == 0)  // Ends: a step or the destructor wakes it
        changed_.wait(lock, [&]() FSDP_REQUIRES(mutex_) { return closing_ || step_ > 0; });
      else
        changed_.wait_for(lock, kCollectiveTick, [&]() FSDP_REQUIRES(mutex_) { return closing_; });
      continue;
    }
    const std::chrono::duration<double> age = Clock::now() - begun_;
    // Without a limit yet: look again when there may be one.
    const double left_s = limit_s ? *limit_s - age.count() : 1;
    if (left_s > 0) {
      changed_.wait_for(lock, std::chrono::duration<double>(left_s),
                        [&]() FSDP_REQUIRES(mutex_) { return closing_; });
      continue;
    }
    if (rank_status::current().in_collective) {
      changed_.wait_for(lock, kCollectiveTick, [&]() FSDP_REQUIRES(mutex_) { return closing_; });
      continue;
    }
    reported = changes_;
    const Stall stall{step_, age.count(), history_.usual_s()};
    Unlocked unlocked(mutex_);
    try {
      report_(stall);
    } catch (const std::exception& problem) {  // a report that can't be written ends nothing
      log::warn(formatted("a step that takes too long wasn't reported: {}", problem.what()));
    }
  }
}

StallReport describe(const Stall& stall) {
  const rank_status::Status status = rank_status::current();
  const std::vector<ThreadStack> stacks = other_stacks();
  StallReport report;
  report.brief = formatted("step {} has taken {} so far; recent steps took {}. {}.", stall.step,
                           in_seconds(stall.seconds), in_seconds(stall.usual_s),
                           rank_status::whereabouts(status, getpid(), std::nullopt));
  report.full = report.brief + "\n";
  for (const ThreadStack& stack : stacks) {
    const bool is_main = stack.thread == getpid();
    report.full += formatted("\nthread {} ({}), {}{}\n", stack.thread, stack.name, stack.state,
                             is_main ? ", the main thread" : "");
    if (stack.frames.empty()) report.full += "  it doesn't answer\n";
    for (size_t i = 0; i < stack.frames.size(); ++i) {
      report.full += formatted("  #{} {}\n", i, stack.frames[i]);
      if (is_main && i < kBriefFrames) report.brief += formatted("\n  #{} {}", i, stack.frames[i]);
    }
  }
  return report;
}

void report(const Stall& stall, const RunDirectory& run, int rank) {
  const StallReport text = describe(stall);
  const std::filesystem::path file = run.stalls(rank);
  std::ofstream(place_of_file(file), std::ios::app) << text.full << "\n";
  comm::flight::write(comm::flight::Cause::kRequest, "a step that takes too long");
  log::warn(
      formatted("{}\n  HINT: the stacks of all threads are in {}; fsdp hang {} says where the "
                "other ranks are; train.stall = 0 turns this off.",
                text.brief, file, run.root));
}

}  // namespace fsdp::train
