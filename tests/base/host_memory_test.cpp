#include "base/host_memory.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <fstream>
#include <string>

namespace fsdp {
namespace {

namespace fs = std::filesystem;

// A root with /proc and /sys as a host has them.
class Root {
 public:
  Root() {
    std::string name = (fs::temp_directory_path() / "fsdp-host-XXXXXX").string();
    path = mkdtemp(name.data());
  }
  ~Root() { fs::remove_all(path); }
  void write(const std::string& name, const std::string& text) const {
    fs::create_directories((path / name).parent_path());
    std::ofstream(path / name) << text;
  }

  fs::path path;
};

constexpr const char* kMeminfo =
    "MemTotal:       4096 kB\nMemFree:   1 kB\nMemAvailable:   2048 kB\n";
constexpr int64_t kKiB = 1024;

TEST(HostMemory, IsTheHostsWithoutAControlGroup) {
  Root root;
  EXPECT_FALSE(host_memory(root.path));
  root.write("proc/meminfo", kMeminfo);
  const auto memory = host_memory(root.path);
  ASSERT_TRUE(memory);
  EXPECT_EQ(memory->total, 4096 * kKiB);
  EXPECT_EQ(memory->usable(), 2048 * kKiB);
  EXPECT_EQ(memory->limit, HostMemory::kNoLimit);
}

TEST(HostMemory, IsWhatTheLowestLimitLeaves) {
  Root root;
  root.write("proc/meminfo", kMeminfo);
  root.write("proc/self/cgroup", "0::/job/step\n");
  root.write("sys/fs/cgroup/job/step/memory.max", "max\n");
  root.write("sys/fs/cgroup/job/memory.max", std::to_string(1000 * kKiB));
  root.write("sys/fs/cgroup/job/memory.current", std::to_string(700 * kKiB));
  root.write("sys/fs/cgroup/job/memory.stat",
             "anon 1\ninactive_file " + std::to_string(200 * kKiB) + "\n");
  const auto memory = host_memory(root.path);
  ASSERT_TRUE(memory);
  EXPECT_EQ(memory->limit, 1000 * kKiB);
  EXPECT_EQ(memory->usable(), 500 * kKiB);
}

TEST(HostMemory, KnowsTheFirstVersionOfControlGroups) {
  Root root;
  root.write("proc/meminfo", kMeminfo);
  root.write("proc/self/cgroup", "5:cpu:/a\n4:memory:/docker/abc\n");
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", std::to_string(600 * kKiB));
  root.write("sys/fs/cgroup/memory/memory.usage_in_bytes", std::to_string(900 * kKiB));
  const auto memory = host_memory(root.path);
  ASSERT_TRUE(memory);
  EXPECT_EQ(memory->usable(), 0);  // more is used than allowed
}

}  // namespace
}  // namespace fsdp
