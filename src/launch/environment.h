// The environment of a rank: torchrun's variables, so that anything written for torchrun runs here,
// and what this machine has to give (cores, GPUs).
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace fsdp::launch {

// One start of all ranks on all nodes; the same on every node.
struct Plan {
  std::string run_id;
  std::vector<int> nprocs;  // ranks of each node
  std::string master_host;
  int master_port = 0;
  int max_restarts = 0;
  int restart = 0;  // 0 for the first start

  int world() const;
  int first_rank(int node) const;
};

using Variables = std::vector<std::pair<std::string, std::string>>;

// What local rank `local` of `node` finds in its environment beside what the launcher has.
// OMP_NUM_THREADS and PYTHONUNBUFFERED are left out where `is_set` says that the user has them.
Variables rank_variables(const Plan& plan, int node, int local, int cores,
                         bool (*is_set)(const char* name));

// The launcher's own environment with `variables` over it, as "NAME=value" for exec.
std::vector<std::string> merged_environment(const Variables& variables);

// Cores this process may use: its affinity and the cgroup's CPU quota, whichever is less; at
// least 1.
int available_cores();

// Cores that the CPU quotas under `root` (/sys/fs/cgroup) grant to the cgroup that `membership`
// (/proc/self/cgroup) names, rounded up; the tightest of it and its parents; 0: no quota.
int quota_cores(const std::string& root, const std::string& membership);

// GPUs in /dev that CUDA_VISIBLE_DEVICES leaves visible.
int visible_gpus();
int visible_gpus(int present, const char* cuda_visible_devices);  // nullptr: not set

}  // namespace fsdp::launch
