// This process's place in the world, as the launcher's environment variables give it.
#pragma once

#include <string>

namespace fsdp::comm {

struct LaunchEnvironment {
  std::string launcher = "none";
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  std::string master_host;  // empty: not given (mpirun)
  int master_port = 0;
  bool agent_store = false;  // torchrun's agent has a store at this address
  int attempt = 0;           // restarts before this one
  bool one_host = false;     // the launcher says that all ranks are on this host
  std::string job;           // the launcher's name for this run; the same on every rank of a host
};

// Looks for fsdp run and torchrun, then OpenMPI, MPICH (Hydra) and srun; the first one found
// decides. Throws an Error that names the variable or value for an environment that makes no sense.
LaunchEnvironment read_launch_environment();

// "node[03-07,12]" → "node03".
std::string first_host(const std::string& slurm_nodelist);

}  // namespace fsdp::comm
