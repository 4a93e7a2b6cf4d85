// What the launcher left in the environment about this process's place in the world.
#pragma once

#include <string>

namespace fsdp::comm {

struct LaunchEnvironment {
  std::string launcher = "none";
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  std::string master_host;  // empty: not said (mpirun)
  int master_port = 0;
  bool agent_store = false;  // torchrun's agent hosts the store: every rank is a client
  int attempt = 0;           // restarts before this one
};

// Reads fsdp run and torchrun, OpenMPI, MPICH (Hydra), srun, in this order; the first that is there
// decides. Error on values that make no sense, naming the variable.
LaunchEnvironment read_launch_environment();

// "node[03-07,12]" → "node03".
std::string first_host(const std::string& slurm_nodelist);

}  // namespace fsdp::comm
