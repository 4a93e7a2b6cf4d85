// The environment of a rank: torchrun's variables, so that programs written for torchrun run
// unchanged, and the cores and GPUs of this machine.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace fsdp::launch {

// One start of all ranks on all nodes; but for `node` the same on every node.
struct Plan {
  std::string run_id;
  std::vector<int> nprocs;  // ranks per node
  int node = 0;             // this one
  std::string master_host;
  int master_port = 0;
  int max_restarts = 0;
  int restart = 0;     // 0 for the first start
  double grace_s = 0;  // node 0's --grace; 0: the default

  int nodes() const { return static_cast<int>(nprocs.size()); }
  int world() const;
  int first_rank(int node) const;
};

using Variables = std::vector<std::pair<std::string, std::string>>;

// The variables that local rank `local` of `node` gets in addition to the launcher's environment.
// Omits OMP_NUM_THREADS and PYTHONUNBUFFERED if `is_set` says that the user has set them.
Variables rank_variables(const Plan& plan, int node, int local, int cores,
                         bool (*is_set)(const char* name));

// The launcher's own environment overridden by `variables`, as "NAME=value" for exec.
std::vector<std::string> merged_environment(const Variables& variables);

// Cores this process may use: the smaller of its affinity and the cgroup's CPU quota, at least 1.
int available_cores();

// Cores that the CPU quotas under `root` (/sys/fs/cgroup) grant to the cgroup in `membership`
// (/proc/self/cgroup): the smallest quota of it and its parents, rounded up; 0: no quota.
int quota_cores(const std::string& root, const std::string& membership);

// GPUs in /dev that CUDA_VISIBLE_DEVICES leaves visible.
int visible_gpus();
int visible_gpus(int present, const char* cuda_visible_devices);  // nullptr: not set

}  // namespace fsdp::launch
