#include "train/memory_saves.h"

#include <ATen/ops/empty.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cmath>

#include "base/format.h"
#include "base/host_memory.h"
#include "base/log.h"
#include "base/table.h"
#include "checkpoint/each_host.h"
#include "checkpoint/together.h"
#include "fsdp/error.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;

constexpr double kCost = 0.015;      // share of the time that saves may take
constexpr double kReserve = 0.1;     // of the host's memory stays free
constexpr int64_t kFirst = 3;        // steps before the first save: those are slow
constexpr int64_t kUsual = 10;       // steps between saves until their cost is known
constexpr int64_t kMostEvery = 1'000'000;
constexpr int kMostFailures = 3;

int64_t bytes_in(const fs::path& folder) {
  int64_t bytes = 0;
  std::error_code problem;
  for (auto entry = fs::recursive_directory_iterator(folder, problem); !problem && entry != end(entry);
       entry.increment(problem)) {
    std::error_code unreadable;
    const auto size = entry->is_regular_file(unreadable) ? entry->file_size(unreadable) : 0;
    if (!unreadable) bytes += static_cast<int64_t>(size);
  }
  return bytes;
}

int64_t free_in(const fs::path& folder) {
  struct statvfs system {};
  if (statvfs(folder.c_str(), &system) != 0) return 0;
  return static_cast<int64_t>(system.f_bavail) * static_cast<int64_t>(system.f_frsize);
}

void keep_newest(const fs::path& folder) {
  try {
    checkpoint::keep_last(folder, 1);
  } catch (const std::exception& problem) {
    log::warn(formatted("an old checkpoint in memory could not be removed: {}", problem.what()));
  }
}

void forget(const fs::path& checkpoint) {
  std::error_code ignored;
  fs::remove_all(checkpoint, ignored);
}

// Other hosts may have to give a rank its random state back.
void share_random_states(const World& world, checkpoint::SaveOptions& options) {
  if (world.size() == world.local_size()) return;
  for (const auto& [key, value] : options.per_rank) {
    const at::Tensor mine = std::get<at::Tensor>(value).to(world.device());
    at::Tensor all = at::empty({world.size(), mine.numel()}, mine.options());
    world.comm().all_gather(all, mine, {.label = "random states"});
    options.extra[key + "_of_ranks"] = all.cpu();
  }
  options.per_rank.clear();
}

std::string size_text(int64_t bytes) {
  return human_bytes(static_cast<double>(bytes));
}

}  // namespace

MemorySaves::MemorySaves(const Training& training, fs::path folder, int64_t first_step)
    : training_(training),
      folder_(std::move(folder)),
      every_(training.config.recovery.every > 0 ? training.config.recovery.every : kUsual),
      next_(first_step + kFirst) {
  const KeepInMemory mode = training.config.recovery.memory;
  if (mode == KeepInMemory::kOff) return;
  std::string why = why_not();
  on_ = !checkpoint::largest(training.world, "checkpoints in memory", !why.empty());
  if (on_) return;
  if (why.empty()) why = "another host has no folder in memory";
  if (mode == KeepInMemory::kOn)
    throw Error(formatted("recovery.memory is on, but {}.", why),
                "set it to auto, or start the run with fsdp run --max-restarts 3.");
  if (!folder_.empty()) why_off_ = formatted("recovery   only from checkpoints on disk: {}", why);
}

std::string MemorySaves::why_not() const {
  const Config& config = training_.config;
  if (folder_.empty())
    return "the launcher keeps no folder in memory: it is fsdp run with --max-restarts that does";
  if (!config.offload.directory.empty()) return "the run's state is on disk (offload.directory)";
  if (!config.checkpoint.async) return "checkpoint.async is false";
  return "";
}

// Bytes that the host lacks; 0 or less: it has enough. Two generations, `copies` times, and the
// tensors on their way there.
int64_t MemorySaves::shortage(const checkpoint::PoolRoom& room, int copies) const {
  const int64_t ranks = training_.world.local_size(), kept = bytes_in(folder_);
  const int64_t files = 2 * copies * room.bytes * ranks;
  const int64_t all = files + ranks * std::min(room.bytes, room.pool);
  const auto memory = host_memory();
  const auto usable = static_cast<double>(memory ? memory->usable() : 0);
  const int64_t lacks = std::max(all - kept - static_cast<int64_t>((1 - kReserve) * usable),
                                 files - kept - free_in(folder_.parent_path()));
  return checkpoint::largest(training_.world, "room for checkpoints in memory", lacks);
}

// What a host has alone is lost with it, unless the next one has a copy.
void MemorySaves::begin_copies(const checkpoint::PoolRoom& room) {
  const World& world = training_.world;
  const KeepCopies mode = training_.config.recovery.buddy;
  const bool alone = world.size() == world.local_size();
  if (mode == KeepCopies::kOff || alone || checkpoint::every_host_has_all(training_.sharded)) return;
  if (const int64_t short_of = shortage(room, 2); short_of <= 0) {
    buddy_ = std::make_unique<checkpoint::Buddy>(world, folder_);
    // After a restart, what the run went on from.
    if (const std::string last = checkpoint::newest_of_hosts(world, folder_); !last.empty())
      buddy_->copy(last);
  } else if (mode == KeepCopies::kOn) {
    throw Error(formatted("recovery.buddy is on, but a host lacks {} for copies of another one's "
                          "checkpoints in memory.",
                          size_text(short_of)),
                "set it to auto, or raise the container's limits.");
  }
}

std::string MemorySaves::begin(const checkpoint::PoolRoom& room) {
  if (!on_) return "";
  const int64_t short_of = shortage(room, 1);
  if (short_of <= 0) {
    ready_ = true;
    begin_copies(room);
    return formatted(
        "recovery   if {} die, the run goes on from a checkpoint in memory ({} times {} per rank)",
        buddy_ ? "ranks or a host" : "ranks", buddy_ ? 4 : 2, size_text(room.bytes));
  }
  on_ = false;
  const std::string text = formatted(
      "two checkpoints in memory (twice {} per rank) need {} more than this host, its container or "
      "/dev/shm has",
      size_text(room.bytes), size_text(short_of));
  if (training_.config.recovery.memory == KeepInMemory::kOn)
    throw Error(formatted("recovery.memory is on, but {}.", text),
                "set it to auto, or raise the container's limits.");
  return formatted("recovery   only from checkpoints on disk: {}", text);
}

void MemorySaves::pass_on() {
  if (!buddy_ || !saving_ || passed_on_ || !saving_->done()) return;
  const std::string name = formatted("step-{}", saved_at_);
  if (fs::exists(folder_ / name)) buddy_->copy(name);  // else the save failed
  passed_on_ = true;
}

// Collective.
bool MemorySaves::copies_are_under_way() {
  if (!buddy_) return false;
  using State = checkpoint::Buddy::State;
  const World& world = training_.world;
  const State state = checkpoint::largest(world, "copies on other hosts", buddy_->state());
  if (state != State::kFailed) return state == State::kCopying || (saving_ && !passed_on_);
  if (buddy_->state() == State::kFailed)
    log::warn(formatted("copies on other hosts are off from here on: {}", buddy_->problem()));
  buddy_.reset();
  return false;
}

// A checkpoint on disk outlives processes as well; it shouldn't wait for one in memory.
bool MemorySaves::disk_save_follows(int64_t step) const {
  const int64_t every = training_.config.checkpoint.every;
  if (every <= 0) return false;
  const int64_t left = (every - step % every) % every;
  return left <= std::min(lasts_, every / 4);
}

bool MemorySaves::due(int64_t step) const {
  if (!on_ || !ready_ || disk_save_follows(step)) return false;
  return training_.config.recovery.every > 0 ? step % every_ == 0 : step >= next_;
}

// How the save before ended, on all ranks, and what it says about how often saves may come.
MemorySaves::Last MemorySaves::look_at_last(double step_seconds) {
  int64_t every = every_, lasts = lasts_;
  Last last = Last::kWhole;
  const bool copying = copies_are_under_way();
  if (copying || (saving_ && !saving_->done())) {
    every *= 2;
    last = Last::kUnfinished;
  } else if (saving_) {
    try {
      saving_->wait();
      const double took = saving_->progress().seconds + (buddy_ ? buddy_->seconds() : 0);
      const double step = std::max(step_seconds, 1e-6);
      // On the CPU, the threads that copy and write take cores from the training.
      const double held = std::chrono::duration<double>(saving_->blocked()).count();
      const double cost = training_.world.device().is_cpu() ? took : held;
      lasts = static_cast<int64_t>(std::ceil(std::min(took / step, 1e6)));
      every = std::max(lasts + 1, static_cast<int64_t>(std::min(cost / step / kCost, 1e6)));
    } catch (const std::exception& problem) {
      last = Last::kFailed;
      if (training_.world.rank() == 0)
        log::warn(formatted("a checkpoint in memory failed: {}", problem.what()));
    }
  }
  const World& world = training_.world;
  lasts_ = checkpoint::largest(world, "checkpoints in memory: length", lasts);
  every = checkpoint::largest(world, "checkpoints in memory: distance", every);
  if (training_.config.recovery.every == 0) every_ = std::clamp<int64_t>(every, 1, kMostEvery);
  return checkpoint::largest(world, "checkpoints in memory: the last one", last);
}

void MemorySaves::turn_off(const std::string& why) {
  on_ = false;
  if (training_.world.rank() == 0)
    log::warn(formatted("checkpoints in memory are off from here on: {}", why));
}

void MemorySaves::save(const RunState& state, double step_seconds) {
  const Last last = look_at_last(step_seconds);
  next_ = state.step + every_;
  if (last == Last::kUnfinished) return;
  failures_ = last == Last::kFailed ? failures_ + 1 : 0;
  if (failures_ >= kMostFailures)
    return turn_off(formatted("{} of them failed in a row.", failures_));
  // A host may have given a name to one that failed on another. Otherwise those before the last one
  // can go.
  if (training_.world.local_rank() == 0) {
    if (last == Last::kFailed)
      forget(folder_ / formatted("step-{}", saved_at_));
    else
      keep_newest(folder_);
  }
  saving_.reset();
  saved_at_ = state.step;
  checkpoint::SaveOptions options = save_options(training_, state);
  options.if_busy = checkpoint::IfBusy::SKIP;
  options.may_fail = options.on_each_host = true;
  share_random_states(training_.world, options);
  try {
    auto saving = checkpoint::save_async(folder_ / formatted("step-{}", state.step),
                                         training_.sharded, training_.optimizer.get(), options);
    if (saving.skipped()) return;
    saving_ = std::move(saving);
    passed_on_ = false;
    came_last_ = true;
  } catch (const std::exception& problem) {
    if (!training_.world.trouble().empty()) throw;              // ranks died, which isn't its fault
    if (training_.saving.done()) training_.saving.wait();  // throws what the one on disk failed with
    turn_off(problem.what());
  }
}

}  // namespace fsdp::train
