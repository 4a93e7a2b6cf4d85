// Exit codes: how a command of `fsdp`, a benchmark or a rank ends. docs/commands.md has the table
// for users. A batch system goes by them: start again, or call somebody.
//
// The numbers above 2 are those of sysexits.h with a meaning that fits. A program killed by signal
// N gives 128 + N; the launcher gives 126 and 127 for programs that can't be started, as a shell
// does.
#pragma once

#include <exception>
#include <string>

#include "base/namespace.h"
#include "fsdp/error.h"

namespace fsdp::base {

enum ExitCode : int {
  kExitDone = 0,
  kExitFailed = 1,     // also: `ckpt diff` found differences, `doctor` a problem
  kExitUsage = 2,      // the command line or the config isn't valid; the same again fails again
  kExitDamaged = 65,   // a checkpoint or a data file is damaged
  kExitLostRank = 69,  // another rank, or its launcher, died or doesn't answer: start again
  kExitNoMemory = 71,  // of the host or the GPU; the same again fails again
  kExitStopped = 75,   // saved after a signal, and not done: start again (--resume=auto only)
  kExitCannotRun = 126,
  kExitNotFound = 127,
  kExitSignal = 128,  // and the signal's number
};

// An Error that decides the exit code of the program that it ends.
class CodedError : public Error {
 public:
  CodedError(ExitCode code, const std::string& message, const std::string& hint)
      : Error(message, hint), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

// Of a program that this exception ends.
ExitCode exit_code(const std::exception& failure);

// Runs `work`. Its errors are those of a command line or a config, unless they say otherwise.
template <typename Work>
auto checking_usage(Work work) {
  try {
    return work();
  } catch (const CodedError&) {
    throw;
  } catch (const Error& failure) {
    throw CodedError(kExitUsage, failure.message(), failure.hint());
  }
}

}  // namespace fsdp::base
