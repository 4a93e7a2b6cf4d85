// The probes of fsdp doctor: each looks at one thing and returns one row of its table. A probe
// changes nothing on the machine. What it cannot make sense of it may throw as an Error; doctor
// shows that as a problem of the row.
#pragma once

#include <string>

namespace fsdp::cli {

struct Finding {
  enum Status {
    kOk,
    kNote,     // works, but something would be slower or is left out
    kProblem,  // something that was asked for cannot work
  };
  std::string found;
  Status status = kOk;
  std::string hint = "";  // empty if and only if ok

  // Keeps the worst status and every hint.
  void complain(Status how, const std::string& what_to_do);
};

// What is installed (software_probes.cpp).
Finding probe_fsdp();
Finding probe_compiler();
Finding probe_libtorch();
Finding probe_cuda_library();
Finding probe_gpus();
Finding probe_nccl();
Finding probe_mpi();
Finding probe_python();

// What this host and the shell allow (host_probes.cpp).
Finding probe_cores();
Finding probe_memory();
Finding probe_shared_memory();
Finding probe_peer_watch();
Finding probe_dev_shm();
Finding probe_limits();
Finding probe_huge_pages();
Finding probe_io_uring();
Finding probe_launcher();
Finding probe_environment();

}  // namespace fsdp::cli
