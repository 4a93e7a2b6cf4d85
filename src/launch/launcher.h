// The launcher behind `fsdp run`: starts a program once per rank, on one node or several, and
// reports how it ended.
#pragma once

#include "launch/options.h"

namespace fsdp::launch {

// Runs until all ranks have exited. complete() must have filled in `options`. Returns the exit
// code: 0 if every rank of every node exited with 0, even after a signal to end; kExitStopped if
// the others exited with that; else the first failing rank's exit code, or 128 + the signal that
// killed it or interrupted the launcher. Throws an Error for anything that goes wrong before a rank
// is started.
int run(const Options& options);

}  // namespace fsdp::launch
