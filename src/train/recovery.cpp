#include "train/recovery.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

#include "base/environment.h"
#include "base/format.h"
#include "base/rank_status.h"
#include "base/regular_file.h"
#include "checkpoint/each_host.h"
#include "checkpoint/together.h"
#include "fsdp/error.h"
#include "shard/interrupted.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kNotice{2};   // until a rank that died is known to be dead
constexpr std::chrono::minutes kAnswer{15};  // of the launcher, which may wait for a slow rank
constexpr std::chrono::milliseconds kPause{5};

fs::path memory_folder() {
  return environment::text("FSDP_MEMORY_DIR").value_or("");
}

int64_t restart_number() {
  return environment::integer("TORCHELASTIC_RESTART_COUNT").value_or(0);
}

bool restarts_are_left() {
  return environment::flag("FSDP_RUN", false) &&
         restart_number() < environment::integer("TORCHELASTIC_MAX_RESTARTS").value_or(0);
}

// The number at the end of "step-100"; -1: none.
int64_t step_of_name(const fs::path& checkpoint) {
  const std::string name = checkpoint.filename().string();
  const std::string digits = name.substr(name.rfind('-') + 1);
  const bool valid =
      !digits.empty() && digits.size() < 18 &&
      std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; });
  return valid ? std::stoll(digits) : -1;
}

std::string full_path(const std::string& dir) {
  std::error_code problem;
  return fs::weakly_canonical(fs::absolute(dir), problem).string();
}

// Each host's first rank notes the run's directory in the folder.
std::string noted_run() {
  return read_if_there(memory_folder() / "run");
}

// --- ranks that stay ---

// Whether this rank's failure is due to that of another one.
bool others_failed(const World& world) {
  const auto deadline = Clock::now() + kNotice;
  do {
    if (rank_status::launcher_is_stopping()) return false;
    if (!world.trouble().empty()) return true;
    std::this_thread::sleep_for(kPause);  // Ends: at the deadline
  } while (Clock::now() < deadline);
  return false;
}

// Waits until the launcher announces the next start, and takes over its variables. False: it won't.
bool join_next_start() {
  const auto before = static_cast<int>(restart_number());
  const auto deadline = Clock::now() + kAnswer;
  rank_status::set_phase("waiting for ranks to be replaced");
  rank_status::set_waits_for(before + 1);
  rank_status::Start next;
  while ((next = rank_status::announced()).attempt <= before) {
    if (rank_status::launcher_is_stopping() || Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kPause);  // Ends: at the deadline
  }
  std::istringstream lines(next.variables);
  for (std::string line; std::getline(lines, line);) {
    const size_t equals = line.find('=');
    if (equals == std::string::npos) continue;
    // No other thread of ours reads the environment now: the world and the training are gone.
    setenv(line.substr(0, equals).c_str(), line.substr(equals + 1).c_str(), /*overwrite=*/1);
  }
  return true;
}

// Trains in one world. nullopt: other ranks died, and nothing of the world is left here; `why` is
// what this rank saw of it.
std::optional<Ended> train_in_one_world(const InitOptions& options, const RunRequest& request,
                                        bool recovers, std::exception_ptr& why) {
  bool others = false;
  try {
    const World world = init(options);
    rank_status::set_joined(static_cast<int>(restart_number()));
    try {
      return train(world, request);
    } catch (const std::exception&) {
      others = recovers && others_failed(world);
      if (others) shard::drop_interrupted_backward();
      throw;  // the world must end during the exception: it then doesn't wait for the others
    }
  } catch (const std::exception&) {
    if (!others) throw;
    why = std::current_exception();
    return std::nullopt;
  }
}

}  // namespace

Ended train_through_faults(const InitOptions& options, const RunRequest& request) {
  for (;;) {
    const bool recovers = restarts_are_left();
    rank_status::set_recovers(recovers);
    std::exception_ptr why;
    if (const auto ended = train_in_one_world(options, request, recovers, why)) return *ended;
    if (!join_next_start()) std::rethrow_exception(why);
  }
}

fs::path memory_checkpoints() {
  const fs::path folder = memory_folder();
  return folder.empty() ? folder : folder / "checkpoints";
}

std::string run_before_restart(const World& world, const Config& config) {
  if (restart_number() == 0) return "";
  // A host that came anew knows nothing of the run.
  for (const std::string& noted : checkpoint::texts_of_all(world, "the run before", noted_run()))
    if (!noted.empty() && (config.dir.empty() || full_path(config.dir) == noted)) return noted;
  return "";
}

void note_run(const World& world, const RunDirectory& run) {
  const fs::path folder = memory_folder();
  if (folder.empty() || world.local_rank() != 0) return;
  std::error_code ignored;
  fs::remove_all(memory_checkpoints(), ignored);
  std::ofstream(place_of_file(folder / "run"), std::ios::binary | std::ios::trunc)
      << full_path(run.root.string());
}

std::vector<StartingPoint> starting_points(const World& world, const std::string& disk) {
  std::vector<StartingPoint> found;
  if (!disk.empty()) found.push_back({disk});
  const std::string memory = checkpoint::newest_of_hosts(world, memory_checkpoints());
  if (memory.empty()) return found;
  const bool newer = disk.empty() || step_of_name(memory) > step_of_name(disk);
  found.insert(newer ? found.begin() : found.end(), {memory_checkpoints() / memory, true});
  return found;
}

void prepare_to_load(const StartingPoint& from, const Training& training) {
  if (from.in_memory)
    checkpoint::bring_to_hosts(training.world, from.path, training.sharded,
                               training.optimizer.get(), load_options(training.config));
}

void forget_others(const World& world, const StartingPoint& used) {
  if (world.local_rank() != 0) return;
  std::error_code problem;
  std::vector<fs::path> others;
  for (const auto& entry : fs::directory_iterator(memory_checkpoints(), problem))
    if (!used.in_memory || entry.path().filename() != used.path.filename())
      others.push_back(entry.path());
  for (const fs::path& other : others) fs::remove_all(other, problem);
}

}  // namespace fsdp::train
