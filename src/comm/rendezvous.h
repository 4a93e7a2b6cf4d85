// Rendezvous: how the ranks of a world find each other and get a common store.
#pragma once

#include <chrono>
#include <string>

#include "comm/launch_environment.h"
#include "comm/store.h"

namespace fsdp::comm {

// Rank 0 (or torchrun's agent) hosts a TCPStore and the others connect; a world of one keeps its
// own store. If the launcher gave no address, MPI carries it. The Error says who couldn't be
// reached, and where.
Store rendezvous(const LaunchEnvironment& launch, bool over_mpi, std::chrono::milliseconds timeout);

}  // namespace fsdp::comm
