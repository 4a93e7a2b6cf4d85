// Rendezvous: how the ranks of a world find each other and get a common store.
#pragma once

#include <chrono>
#include <string>

#include "comm/launch_environment.h"
#include "comm/store.h"

namespace fsdp::comm {

// Rank 0 (or torchrun's agent) hosts a TCPStore, the others connect; a world of one keeps a store
// of its own. Where the launcher gave no address, it travels over MPI. Error says who could not be
// reached, and where.
Store rendezvous(const LaunchEnvironment& launch, bool over_mpi, std::chrono::milliseconds timeout);

}  // namespace fsdp::comm
