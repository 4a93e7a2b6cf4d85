// MemorySaves: checkpoints in the memory of the host, beside those on disk.
//
// They are ordinary checkpoints, written in the background into a folder that the launcher made in
// /dev/shm. They outlive every process of the run but the launcher. There are two generations: the
// last one that is complete, and the one that is being written. On several hosts, a generation counts
// as complete once each host's files are on the next host as well (checkpoint/buddy.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/buddy.h"
#include "fsdp/checkpoint.h"
#include "train/training.h"

namespace fsdp::train {

class MemorySaves {
 public:
  // `folder`: for checkpoints; empty: there is none. Throws Error if recovery.memory is "on" and
  // that isn't possible. Collective.
  MemorySaves(const Training& training, std::filesystem::path folder, int64_t first_step);

  bool wanted() const { return on_; }
  const std::string& why_off() const { return why_off_; }  // a line for the user; mostly empty
  // After the first step. Finds out whether the host has room; if not, saves are off. Collective.
  // Returns a line for the user, if there is something to say.
  std::string begin(const checkpoint::PoolRoom& room);
  // After each step: a save that is complete begins to go to the next host.
  void pass_on();
  bool due(int64_t step) const;
  // Collective. Never fails because memory is short.
  void save(const RunState& state, double step_seconds);
  // Whether the last save of this run was one in memory, which may not be finished yet. The same on
  // all ranks.
  bool came_last() const { return came_last_; }
  void other_save_came() { came_last_ = false; }

 private:
  std::string why_not() const;
  int64_t shortage(const checkpoint::PoolRoom& room, int copies) const;
  void begin_copies(const checkpoint::PoolRoom& room);
  enum class Last { kWhole, kUnfinished, kFailed };
  Last look_at_last(double step_seconds);
  bool copies_are_under_way();
  void turn_off(const std::string& why);
  bool disk_save_follows(int64_t step) const;

  const Training& training_;
  const std::filesystem::path folder_;
  std::string why_off_;
  bool on_ = false, ready_ = false, came_last_ = false;
  int64_t every_, next_;  // steps
  int64_t lasts_ = 0;     // steps that a save takes
  int64_t saved_at_ = 0;  // step of the last save
  int failures_ = 0;      // in a row
  std::optional<checkpoint::AsyncSave> saving_;
  bool passed_on_ = false;  // what saving_ wrote
  std::unique_ptr<checkpoint::Buddy> buddy_;  // null: no copies on other hosts
};

}  // namespace fsdp::train
