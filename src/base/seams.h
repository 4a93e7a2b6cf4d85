// Seams: where tests stand in for the system. A process has one set of them; only tests change it,
// through the constructor of a WithSeams.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>

#include "base/namespace.h"

namespace fsdp::shard {
class StepGraph;
}

namespace fsdp::base {

struct Seams {
  // Called before a file of offloaded state is allocated ("allocate") and after each of its pieces
  // is read or written ("read", "write"). An errno makes that call fail.
  std::function<int(const char* call, int64_t offset)> disk;
  // Called before every system call of a checkpoint that changes something on the disk, and before
  // a tensor is copied for a save in the background ("copy"). An errno makes that call fail.
  std::function<int(const char* call, const std::filesystem::path& path)> files;
  // Makes the graphs of steps, on the CPU too.
  std::function<std::unique_ptr<shard::StepGraph>()> graphs;
  int64_t smallest_offloaded = int64_t{1} << 20;  // bytes; smaller activations stay on the device
  int64_t matrix_bucket = int64_t{128} << 20;     // bytes per rank of matrices that travel together
};

const Seams& seams();

// Replaces the seams while alive.
class WithSeams {
 public:
  explicit WithSeams(Seams seams);
  ~WithSeams();
  WithSeams(const WithSeams&) = delete;
  WithSeams& operator=(const WithSeams&) = delete;

 private:
  const Seams* const before_;
};

}  // namespace fsdp::base
