// Owner: the one process that may write into a run's directory: rank 0 of the run.
//
// RUN/owner/N.json names the process that took the directory as the N-th: its host, PID and start.
// The file of the highest number is the owner's. Numbers (epochs) are taken with link(2), which
// fails if the name exists, on NFS as well; so of two that try, one wins. The winner removes the
// files of earlier owners and renames the checkpoints that they have begun (checkpoint::fence).
//
// An owner checks that its file is still there before it publishes or deletes a checkpoint and
// before it writes a line. A process that was stopped or cut off meanwhile thus ends with an Error
// when it wakes up. What it has begun to write can't get a name anymore.
//
// Who may take a directory whose last owner didn't give it back:
// - On the owner's machine: anyone, once that process has ended. It gets a moment to do so, and
//   longer if it has been killed.
// - On another machine, or in another container: anyone, once the owner's file hasn't been touched
//   for a while (Times::silence). The owner touches it every few seconds. Times are the file
//   system's, so clocks needn't agree.
// - With `take_over`: anyone, at once.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "train/run_directory.h"

namespace fsdp::train {

class Owner {
 public:
  struct Times {
    std::chrono::milliseconds beat{5'000};      // between two touches
    std::chrono::milliseconds silence{30'000};  // after it an owner elsewhere counts as dead
    std::chrono::milliseconds moment{2'000};    // that a process on this machine gets to end
    std::chrono::milliseconds ending{60'000};   // or one that has been killed
  };

  // Takes the directory, which must have a folder for checkpoints. Throws Error if another process
  // owns it; waits as above to find out.
  Owner(const RunDirectory& run, bool take_over, Times times);
  Owner(const RunDirectory& run, bool take_over) : Owner(run, take_over, Times{}) {}
  ~Owner();  // gives it back
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;

  int64_t number() const;            // 1 for the first owner
  const std::string& epoch() const;  // the number and a random part, for checkpoint::Ownership
  // Throws Error unless this process is still the owner and the directory is still there. For any
  // thread.
  void check() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fsdp::train
