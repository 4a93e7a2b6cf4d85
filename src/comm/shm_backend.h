// The shm backend: c10d::Backend over a shared-memory group (comm/shm).
#pragma once

#include "comm/backend.h"
#include "comm/shm/group.h"
#include "comm/store.h"

namespace fsdp::comm {

class ShmBackend : public CpuBackend {
 public:
  // `trouble` says why a rank may not come while the group is created.
  ShmBackend(Store store, std::string name, int rank, int size, std::chrono::milliseconds timeout,
             std::function<std::string()> trouble = {});
  ~ShmBackend() override;

  at::Tensor allocate_shared(int64_t bytes) override;

 private:
  void run(const Call& call) override;

  shm::Group group_;
};

}  // namespace fsdp::comm
