// The launcher behind `fsdp run`: starts a program once for each rank, on one node or several, and
// answers for how it ended.
#pragma once

#include "launch/options.h"

namespace fsdp::launch {

// Runs to the end; `options` are complete(). Returns the exit code: 0 when every rank of every node
// exited with 0 (also when that was their answer to an interrupt); else the first failing rank's
// exit code, or 128 + the signal that killed it or interrupted us. Throws an Error for what goes
// wrong before any rank is started.
int run(const Options& options);

}  // namespace fsdp::launch
