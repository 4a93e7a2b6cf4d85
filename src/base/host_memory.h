// How much memory this host has for us: its own, and what control groups (containers, Slurm) allow.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>

#include "base/namespace.h"

namespace fsdp::base {

struct HostMemory {
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

  int64_t total = 0;         // bytes of the host
  int64_t available = 0;     // without swapping
  int64_t limit = kNoLimit;  // the lowest of our control group and its parents
  int64_t left = kNoLimit;   // below that limit; cached files count as free

  int64_t usable() const { return available < left ? available : left; }
};

// Reads /proc and /sys below `root`. nullopt if /proc can't be read.
std::optional<HostMemory> host_memory(const std::filesystem::path& root = "/");

}  // namespace fsdp::base
