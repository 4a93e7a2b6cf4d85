#include "base/host_memory.h"

#include <algorithm>
#include <sstream>
#include <string>

#include "base/regular_file.h"

namespace fsdp::base {
namespace {

using Path = std::filesystem::path;

// The number a file starts with; nullopt if it is missing or says "max".
std::optional<int64_t> number_in(const Path& path) {
  std::istringstream file(read_if_there(path));
  int64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// The number behind a word at the beginning of a line, with or without a colon.
std::optional<int64_t> number_after(const Path& path, const std::string& name) {
  std::istringstream file(read_if_there(path));
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key;
    int64_t value = 0;
    if (words >> key >> value && (key == name || key == name + ":")) return value;
  }
  return std::nullopt;
}

// One control group: version 1 or 2.
void add_group(HostMemory& memory, const Path& group, bool second) {
  const auto limit = number_in(group / (second ? "memory.max" : "memory.limit_in_bytes"));
  if (!limit) return;
  memory.limit = std::min(memory.limit, *limit);
  const auto used = number_in(group / (second ? "memory.current" : "memory.usage_in_bytes"));
  const auto cached =
      number_after(group / "memory.stat", second ? "inactive_file" : "total_inactive_file");
  const int64_t taken = std::max<int64_t>(used.value_or(0) - cached.value_or(0), 0);
  memory.left = std::min(memory.left, std::max<int64_t>(*limit - taken, 0));
}

}  // namespace

std::optional<HostMemory> host_memory(const Path& root) {
  const auto total = number_after(root / "proc/meminfo", "MemTotal");
  const auto available = number_after(root / "proc/meminfo", "MemAvailable");
  if (!total || !available) return std::nullopt;
  HostMemory memory{.total = *total * 1024, .available = *available * 1024};
  // In a container the path may be the host's and missing here; then only the parents count.
  std::istringstream lines(read_if_there(root / "proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {  // "0::/path" or "4:memory:/path"
    const bool second = line.starts_with("0::");
    const size_t v1 = line.find(":memory:");
    if (!second && v1 == std::string::npos) continue;
    const Path base = root / (second ? "sys/fs/cgroup" : "sys/fs/cgroup/memory");
    Path path = Path(line.substr(second ? 3 : v1 + 8)).relative_path();
    for (bool more = true; more; path = path.parent_path()) {
      add_group(memory, base / path, second);
      more = !path.empty();
    }
  }
  return memory;
}

}  // namespace fsdp::base
