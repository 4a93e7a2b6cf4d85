// Rendezvous: how the ranks of a world find each other and get a common store.
#pragma once

#include <chrono>
#include <string>

#include "comm/launch_environment.h"
#include "comm/store.h"

namespace fsdp::comm {

// Rank 0 holds the store (comm/store_server.h) and the others connect; a world of one needs no
// other process. On one host the store is a Unix socket whose name all ranks derive alike. Across
// hosts it listens on MASTER_PORT, or on a free port whose address MPI or torchrun's agent passes
// on. The Error says who couldn't be reached, and where.
Store rendezvous(const LaunchEnvironment& launch, bool over_mpi, std::chrono::milliseconds timeout);

}  // namespace fsdp::comm
