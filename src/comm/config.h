// [comm] of a run's config.
#pragma once

#include "base/options.h"

namespace fsdp::comm {

enum class CommBackend { kAuto, kShm, kMpi, kNccl };
constexpr auto enum_table(CommBackend) {
  return std::to_array<EnumName>(
      {{"auto", "chosen by device and number of hosts"}, {"shm"}, {"mpi"}, {"nccl"}});
}

struct CommConfig {
  CommBackend backend = CommBackend::kAuto;
  double timeout = 0;  // seconds; 0: FSDP_TIMEOUT, or 300
};

inline void describe(CommConfig& comm, OptionList& list) {
  list.section("comm", "Communication");
  list.add("backend", comm.backend, "Communication backend");
  list.add("timeout", comm.timeout,
           "Seconds before an unfinished collective is an error; 0: FSDP_TIMEOUT, else 300",
           {.least = 0, .most = 1e6});
}

}  // namespace fsdp::comm
