#include "launch/environment.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <sstream>

#include "base/environment.h"
#include "base/regular_file.h"

namespace fsdp::launch {
namespace {

// The quota of one cgroup folder in cores; 0: none. cgroup v2 has cpu.max, v1 has two files.
double quota_of(const std::filesystem::path& folder) {
  double quota = 0, period = 0;
  std::istringstream both(read_if_there(folder / "cpu.max"));
  if (both >> quota >> period && period > 0) return quota / period;  // "max 100000" fails at max
  std::istringstream first(read_if_there(folder / "cpu.cfs_quota_us"));
  std::istringstream second(read_if_there(folder / "cpu.cfs_period_us"));
  if (first >> quota && second >> period && quota > 0 && period > 0) return quota / period;
  return 0;
}

}  // namespace

int Plan::world() const {
  return std::accumulate(nprocs.begin(), nprocs.end(), 0);
}

int Plan::first_rank(int node) const {
  return std::accumulate(nprocs.begin(), nprocs.begin() + node, 0);
}

Variables rank_variables(const Plan& plan, int node, int local, int cores,
                         bool (*is_set)(const char* name)) {
  int nproc = plan.nprocs[node];
  auto rank = std::to_string(plan.first_rank(node) + local);
  auto world = std::to_string(plan.world());
  Variables variables = {
      {"RANK", rank},
      {"WORLD_SIZE", world},
      {"LOCAL_RANK", std::to_string(local)},
      {"LOCAL_WORLD_SIZE", std::to_string(nproc)},
      {"GROUP_RANK", std::to_string(node)},
      {"NODE_RANK", std::to_string(node)},
      {"GROUP_WORLD_SIZE", std::to_string(plan.nprocs.size())},
      {"ROLE_NAME", "default"},
      {"ROLE_RANK", rank},
      {"ROLE_WORLD_SIZE", world},
      {"MASTER_ADDR", plan.master_host},
      {"MASTER_PORT", std::to_string(plan.master_port)},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(plan.restart)},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(plan.max_restarts)},
      {"TORCHELASTIC_RUN_ID", plan.run_id},
      {"FSDP_RUN", "1"},
  };
  if (!is_set("OMP_NUM_THREADS")) {
    variables.emplace_back("OMP_NUM_THREADS", std::to_string(std::max(1, cores / nproc)));
  }
  // Python buffers what it prints to a pipe; a rank that dies would lose its last lines.
  if (!is_set("PYTHONUNBUFFERED")) variables.emplace_back("PYTHONUNBUFFERED", "1");
  return variables;
}

std::vector<std::string> merged_environment(const Variables& variables) {
  std::vector<environment::Change> changes(variables.begin(), variables.end());
  // Rank 0 hosts the store. With an outer torchrun's setting every rank would wait for its agent.
  changes.emplace_back("TORCHELASTIC_USE_AGENT_STORE", std::nullopt);
  return environment::changed(changes);
}

int available_cores() {
  int cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) cores = CPU_COUNT(&mask);
  int quota = quota_cores("/sys/fs/cgroup", read_if_there("/proc/self/cgroup"));
  if (quota > 0) cores = std::min(cores, quota);
  return std::max(1, cores);
}

int quota_cores(const std::string& root, const std::string& membership) {
  double least = 0;
  std::istringstream lines(membership);
  for (std::string line; std::getline(lines, line);) {  // "0::/path" or "4:cpu,cpuacct:/path"
    auto first = line.find(':');
    auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::filesystem::path base = root;
    if (controllers == ",,") {
    } else if (controllers.find(",cpu,") != std::string::npos) {
      base /= std::filesystem::exists(base / "cpu") ? "cpu" : "cpu,cpuacct";
    } else {
      continue;
    }
    // Inside a container the path may be the host's and not exist here; its parents are tried then.
    std::filesystem::path path = line.substr(second + 1);
    for (bool more = true; more; path = path.parent_path()) {
      double quota = quota_of(base / path.relative_path());
      if (quota > 0 && (least == 0 || quota < least)) least = quota;
      more = path.has_relative_path();
    }
  }
  return static_cast<int>(std::ceil(least));
}

int visible_gpus() {
  int present = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", ignored)) {
    std::string name = entry.path().filename();
    if (name.starts_with("nvidia") && name.size() > 6 &&
        std::all_of(name.begin() + 6, name.end(),
                    [](unsigned char c) { return std::isdigit(c); })) {
      ++present;
    }
  }
  return visible_gpus(present, std::getenv("CUDA_VISIBLE_DEVICES"));
}

int visible_gpus(int present, const char* cuda_visible_devices) {
  if (!cuda_visible_devices) return present;
  int visible = 0;
  std::istringstream names(cuda_visible_devices);
  // CUDA stops at the first name that isn't a device: with "0,-1,1" one GPU is visible.
  for (std::string name; std::getline(names, name, ',');) {
    if (name.empty() || name.front() == '-') break;
    ++visible;
  }
  return std::min(visible, present);
}

}  // namespace fsdp::launch
