#include "comm/launch_environment.h"

#include <unistd.h>

#include <functional>

#include "base/environment.h"
#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

using environment::integer;
using environment::text;

// A port that all ranks compute alike and other jobs are unlikely to use. It is below the
// ports that systems give to outgoing connections (from 32768 on Linux), any of which may be in
// use.
int port_from(const std::string& job) {
  constexpr size_t kFirst = 20000, kEnd = 32768;
  return static_cast<int>(kFirst + std::hash<std::string>{}(job) % (kEnd - kFirst));
}

int required(const char* name, const char* because) {
  if (auto value = integer(name)) return static_cast<int>(*value);
  throw Error(formatted("{} is set, but {} is not.", because, name),
              formatted("start the program with fsdp run, torchrun, mpirun or srun; they set both. "
                        "To run one process alone, unset {}.",
                        because));
}

void check(const LaunchEnvironment& found) {
  auto refuse = [&](const std::string& why) {
    throw Error(
        formatted("the environment of {} makes no sense: {}.", found.launcher, why),
        "start the program with fsdp run, torchrun, mpirun or srun, or unset the variables.");
  };
  if (found.size < 1) refuse(formatted("a world of {} ranks", found.size));
  if (found.rank < 0 || found.rank >= found.size)
    refuse(formatted("rank {} in a world of {}", found.rank, found.size));
  if (found.local_size < 1 || found.local_rank < 0 || found.local_rank >= found.local_size)
    refuse(formatted("local rank {} of {}", found.local_rank, found.local_size));
  if (found.master_port < 0 || found.master_port > 65535)
    refuse(formatted("MASTER_PORT is {}", found.master_port));
}

void read_local(LaunchEnvironment& found, const char* rank, const char* size) {
  found.local_rank = static_cast<int>(integer(rank).value_or(0));
  found.local_size = static_cast<int>(integer(size).value_or(found.local_rank + 1));
  // All ranks must come to the same answer, so a guessed size doesn't count.
  found.one_host = integer(size) && found.local_size == found.size;
}

// A batch script has SLURM_PROCID too; only an srun step has a number of tasks. With --mpi=pmi2,
// srun also sets MPICH's PMI_RANK, but not its local rank.
bool srun_step() {
  return integer("SLURM_PROCID") && text("SLURM_STEP_ID") && integer("SLURM_STEP_NUM_TASKS");
}

}  // namespace

std::string first_host(const std::string& nodelist) {
  size_t bracket = nodelist.find('['), comma = nodelist.find(',');
  if (bracket == std::string::npos || comma < bracket) return nodelist.substr(0, comma);
  size_t end = nodelist.find_first_of(",-]", bracket);
  return nodelist.substr(0, bracket) + nodelist.substr(bracket + 1, end - bracket - 1);
}

LaunchEnvironment read_launch_environment() {
  LaunchEnvironment found;
  found.master_host = text("MASTER_ADDR").value_or("");
  found.master_port = static_cast<int>(integer("MASTER_PORT").value_or(0));
  std::string parent = std::to_string(getppid());
  if (integer("RANK") || integer("WORLD_SIZE")) {
    found.launcher = text("FSDP_RUN") ? "fsdp run" : "torchrun";
    found.size = required("WORLD_SIZE", "RANK");
    found.rank = required("RANK", "WORLD_SIZE");
    read_local(found, "LOCAL_RANK", "LOCAL_WORLD_SIZE");
    found.agent_store = environment::flag("TORCHELASTIC_USE_AGENT_STORE", false);
    found.attempt = static_cast<int>(integer("TORCHELASTIC_RESTART_COUNT").value_or(0));
    found.job = text("TORCHELASTIC_RUN_ID").value_or("");
    if (found.size > 1 && (found.master_host.empty() || found.master_port == 0))
      throw Error("RANK and WORLD_SIZE are set, but MASTER_ADDR or MASTER_PORT is not.",
                  "set both to the host of rank 0 and a free port there, or use fsdp run.");
  } else if (integer("OMPI_COMM_WORLD_RANK")) {
    found.launcher = "OpenMPI";
    found.rank = required("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK");
    found.size = required("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK");
    read_local(found, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
    found.job = text("PMIX_NAMESPACE").value_or(parent);
  } else if (integer("PMI_RANK") && (integer("MPI_LOCALRANKID") || !srun_step())) {
    found.launcher = "MPICH";
    found.rank = required("PMI_RANK", "PMI_RANK");
    found.size = required("PMI_SIZE", "PMI_RANK");
    read_local(found, "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
    found.job = parent;
  } else if (srun_step()) {
    found.launcher = "srun";
    found.rank = required("SLURM_PROCID", "SLURM_PROCID");
    found.size = required("SLURM_STEP_NUM_TASKS", "SLURM_PROCID");
    found.local_rank = static_cast<int>(integer("SLURM_LOCALID").value_or(0));
    int nodes = static_cast<int>(integer("SLURM_STEP_NUM_NODES").value_or(1));
    // Assumes as many tasks on every node, the common case; SLURM allows others ("4(x2),3").
    found.local_size =
        std::max(found.local_rank + 1, (found.size + nodes - 1) / std::max(nodes, 1));
    if (found.master_host.empty())
      found.master_host = first_host(text("SLURM_STEP_NODELIST").value_or("127.0.0.1"));
    found.one_host = nodes == 1;
    found.job = text("SLURM_JOB_ID").value_or("") + "." + *text("SLURM_STEP_ID");
    if (found.master_port == 0) found.master_port = port_from(found.job);
  }
  check(found);
  return found;
}

}  // namespace fsdp::comm
