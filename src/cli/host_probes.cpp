// Probes of what this host and the shell allow: cores, memory, shared memory between ranks, limits,
// and environment variables. Files of /proc and /sys may be missing or hold anything.
#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <optional>
#include <set>

#include "base/environment.h"
#include "base/format.h"
#include "base/hidden_sve.h"
#include "base/host_memory.h"
#include "base/regular_file.h"
#include "base/table.h"
#include "cli/probes.h"
#include "comm/launch_environment.h"
#include "comm/settings.h"
#include "comm/shm/mapping.h"
#include "disk/engine.h"
#include "fsdp/error.h"
#include "launch/environment.h"

extern char** environ;

namespace fsdp::cli {
namespace {

namespace fs = std::filesystem;

constexpr double kMiB = 1 << 20, kGiB = 1 << 30;

rlim_t limit_of(int resource) {
  rlimit limit{};
  return getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) == 0 ? limit.rlim_cur
                                                                            : RLIM_INFINITY;
}

// A process that only holds copies of our descriptors, as another rank would.
class Bystander {
 public:
  Bystander() : pid_(fork()) {
    if (pid_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) pause();
  }
  ~Bystander() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);  // Ends: it was killed
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
};

bool changes_us(const std::string& name) {
  static const std::set<std::string> names = {"CUDA_VISIBLE_DEVICES", "FSDP_BACKEND",
                                              "FSDP_FAKE_WORLD",      "FSDP_HOST_ID",
                                              "FSDP_TIMEOUT",         "OMP_NUM_THREADS"};
  return names.count(name) || name.starts_with("NCCL_") || name.starts_with("TORCH_NCCL_");
}

}  // namespace

Finding probe_blas() {
  if (!this_machine_hides_sve()) return {"no workaround needed"};
  Finding finding{formatted("this CPU's SVE is hidden; {}={} {}", kNvplVariable,
                            environment::text(kNvplVariable).value_or(""),
                            nvpl_variable_was_set_by_us() ? "set by fsdp" : "in the environment")};
  if (nvpl_variable_was_set_by_us())
    finding.complain(
        Finding::kNote,
        formatted("NVPL BLAS would hang in its first matrix product, so fsdp makes it "
                  "use kernels without SVE. Python programs need the same: export {}=1.",
                  kNvplVariable));
  return finding;
}

Finding probe_cores() {
  int hardware = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)), affinity = hardware;
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) affinity = CPU_COUNT(&mask);
  int quota = launch::quota_cores("/sys/fs/cgroup", read_if_there("/proc/self/cgroup"));
  int usable = launch::available_cores();
  Finding finding{
      formatted("{} online, {} by affinity, {}", hardware, affinity,
                quota > 0 ? formatted("{} by cgroup quota", quota) : "no cgroup quota")};
  if (quota > 0 && quota < affinity)
    finding.complain(
        Finding::kNote,
        formatted("threads beyond the quota are stopped, even in the middle of a collective: keep "
                  "ranks x OMP_NUM_THREADS at {} or less, or raise the quota.",
                  quota));
  // OpenMP also takes a list ("4,2"); the first number counts here.
  auto asked = environment::text("OMP_NUM_THREADS");
  int threads = asked ? std::atoi(asked->c_str()) : 1;
  if (threads < 1)
    finding.complain(
        Finding::kNote,
        formatted("OMP_NUM_THREADS={} isn't a number of threads and is ignored; unset it.",
                  *asked));
  if (threads > usable)
    finding.complain(
        Finding::kNote,
        formatted(
            "OMP_NUM_THREADS={} is more than the {} usable cores, so threads would take turns. "
            "Set it to cores / ranks, or unset it: fsdp run then sets it.",
            threads, usable));
  return finding;
}

Finding probe_memory() {
  const auto memory = host_memory();
  if (!memory) return {"unknown", Finding::kNote, "can't read /proc/meminfo; is /proc mounted?"};
  const bool limited = memory->limit < memory->total;  // old cgroups write "none" as a huge number
  const auto bytes = [](int64_t count) { return human_bytes(static_cast<double>(count)); };
  const auto usable = static_cast<double>(memory->usable());
  Finding finding{
      formatted("{}, {} available, {}", bytes(memory->total), bytes(memory->available),
                limited ? bytes(memory->limit) + " by cgroup limit" : "no cgroup limit")};
  if (usable < 2 * kGiB)
    finding.complain(
        Finding::kNote,
        formatted("only {} are left for all ranks on this host; stop other programs or raise "
                  "the container's limit.",
                  human_bytes(usable)));
  return finding;
}

Finding probe_shared_memory() {
  using comm::shm::Mapping;
  auto memory = Mapping::create(1 << 20, "fsdp doctor");
  memory->data()[0] = 1;
  Bystander other;
  if (other.pid() < 0)
    return {"can't start a process", Finding::kProblem,
            "raise the limit on processes (ulimit -u)."};
  auto address = memory->address();
  address.pid = other.pid();
  Mapping::open(address, "fsdp doctor");
  return {"memfd works, also between processes"};
}

Finding probe_peer_watch() {
#ifdef SYS_pidfd_open
  long handle = syscall(SYS_pidfd_open, getpid(), 0);
  if (handle >= 0) {
    close(static_cast<int>(handle));
    return {"pidfd_open works"};
  }
#endif
  return {
      "no pidfd_open", Finding::kNote,
      "dead ranks are then detected through /proc, which a reused process id can fool; Linux 5.3 "
      "or newer has it, if the container's seccomp profile allows it."};
}

Finding probe_dev_shm() {
  struct statvfs info {};
  bool there = statvfs("/dev/shm", &info) == 0;
  double bytes =
      there ? static_cast<double>(info.f_blocks) * static_cast<double>(info.f_frsize) : 0;
  Finding finding{there ? human_bytes(bytes) : "missing"};
  if (bytes <= 64 * kMiB)  // docker's default
    finding.complain(Finding::kNote,
                     "fsdp doesn't use it, but NCCL and PyTorch's data loaders do: start the "
                     "container with --shm-size=8g.");
  return finding;
}

Finding probe_limits() {
  auto bytes = [](rlim_t limit) {
    return limit == RLIM_INFINITY ? std::string("unlimited")
                                  : human_bytes(static_cast<double>(limit));
  };
  rlim_t space = limit_of(RLIMIT_AS), locked = limit_of(RLIMIT_MEMLOCK);
  rlim_t files = limit_of(RLIMIT_NOFILE);
  Finding finding{formatted("address space {}, locked memory {}, open files {}", bytes(space),
                            bytes(locked),
                            files == RLIM_INFINITY ? "unlimited" : std::to_string(files))};
  if (space != RLIM_INFINITY)
    finding.complain(Finding::kNote,
                     "ranks map each other's memory, so they run out of address space long before "
                     "memory: ulimit -v unlimited.");
  if (comm::gpu_present() && locked < static_cast<rlim_t>(64 * kMiB))
    finding.complain(Finding::kNote,
                     "NCCL over InfiniBand registers locked memory: ulimit -l unlimited (docker: "
                     "--ulimit memlock=-1).");
  if (files < 1024)
    finding.complain(Finding::kNote, "every rank opens files of every other rank: ulimit -n 4096.");
  return finding;
}

Finding probe_huge_pages() {
  constexpr const char* kFile = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
  std::string choices = read_if_there(kFile);  // "always within_size advise [never] deny force"
  size_t open = choices.find('['), close = choices.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open)
    return {"this kernel has none for shared memory"};
  std::string chosen = choices.substr(open + 1, close - open - 1);
  Finding finding{chosen + " for shared memory"};
  if (chosen == "never" || chosen == "deny")
    finding.complain(
        Finding::kNote,
        formatted("they make gathers of large models faster: echo advise | sudo tee {}.", kFile));
  return finding;
}

Finding probe_io_uring() {
  const std::string why_not = disk::why_no_uring();
  if (why_not.empty()) return {"works (for state on a disk)"};
  return {
      "not used: " + why_not, Finding::kNote,
      "state on a disk (offload.directory) goes through threads instead, which take more CPU time; "
      "install liburing-dev before building, and allow io_uring in the container "
      "(sysctl kernel.io_uring_disabled=0, or docker's --security-opt seccomp=...)."};
}

Finding probe_launcher() {
  comm::LaunchEnvironment found = comm::read_launch_environment();
  if (found.launcher == "none") return {"none (a world of one rank)"};
  std::string master = found.master_host.empty()
                           ? "unknown"
                           : formatted("{}:{}", found.master_host, found.master_port);
  return {formatted("{}: rank {} of {} (local {} of {}), master {}", found.launcher, found.rank,
                    found.size, found.local_rank, found.local_size, master)};
}

Finding probe_environment() {
  std::set<std::string> set;
  for (char** entry = environ; *entry; ++entry) {
    std::string text = *entry;
    if (changes_us(text.substr(0, text.find('=')))) set.insert(text);
  }
  Finding finding;
  for (const std::string& entry : set) finding.found += (finding.found.empty() ? "" : ", ") + entry;
  if (set.empty()) finding.found = "no variable that affects fsdp is set";
  using Check = void (*)();
  for (Check check : {Check([] { comm::asked_backend(); }), Check([] { comm::asked_timeout(); }),
                      Check([] { comm::asked_fake_size(); })}) {
    try {
      check();
    } catch (const Error& wrong) {
      finding.complain(Finding::kProblem, formatted("{} {}", wrong.message(), wrong.hint()));
    }
  }
  return finding;
}

}  // namespace fsdp::cli
