// The probes of fsdp doctor: each checks one thing and returns one row of the table. A probe
// changes nothing on the machine. It may throw an Error, which doctor shows as a problem of that
// row.
#pragma once

#include <string>

namespace fsdp::cli {

struct Finding {
  enum Status {
    kOk,
    kNote,     // works, but something is slower or left out
    kProblem,  // something the user asked for can't work
  };
  std::string found;
  Status status = kOk;
  std::string hint = "";  // empty if and only if ok

  // Keeps the worst status and every hint.
  void complain(Status how, const std::string& what_to_do);
};

// What is installed (software_probes.cpp).
std::string versions();  // of this build, its compiler and LibTorch
Finding probe_fsdp();
Finding probe_compiler();
Finding probe_libtorch();
Finding probe_cuda_library();
Finding probe_gpus();
Finding probe_nccl();
Finding probe_mpi();
Finding probe_python();

// What this host and the shell allow (host_probes.cpp).
Finding probe_blas();
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
