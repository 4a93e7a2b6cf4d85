// Scratch files: their blocks, what they leave behind, and disks that are too small.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "disk/places.h"

namespace fsdp::disk {
namespace {

TEST(ScratchFile, IsFullyAllocatedAndUnlinkedFromTheStart) {
  const Directory directory;
  const ScratchFile file(directory.path, (3 << 20) + 1);
  EXPECT_EQ(file.bytes(), (3 << 20) + 4096);
  struct stat status {};
  ASSERT_EQ(::fstat(file.descriptor(), &status), 0);
  EXPECT_EQ(status.st_size, file.bytes());
  EXPECT_GE(status.st_blocks * 512, file.bytes());
  EXPECT_EQ(status.st_nlink, 0u);
  EXPECT_TRUE(std::filesystem::is_empty(directory.path));
}

TEST(ScratchFile, AProcessCanHaveSeveral) {
  const Directory directory;
  const ScratchFile one(directory.path, 4096), other(directory.path, 4096, /*direct=*/false);
  EXPECT_NE(one.path(), other.path());
  EXPECT_FALSE(other.direct());
}

TEST(ScratchFile, AFullDiskIsAnErrorWithDirectoryAndBytes) {
  const Directory directory;
  const WithSeams full({.disk = [](const char* call, int64_t) {
    return std::string(call) == "allocate" ? ENOSPC : 0;
  }});
  const std::string said = error_of([&] { ScratchFile(directory.path, 1 << 20); });
  EXPECT_TRUE(holds(said, directory.path)) << said;
  EXPECT_TRUE(holds(said, "1,048,576 bytes")) << said;
  EXPECT_TRUE(holds(said, "are free")) << said;
  EXPECT_TRUE(holds(said, "HINT")) << said;
}

TEST(ScratchFile, MoreThanTheDiskHasIsAnError) {
  const Directory directory;
  const auto space = std::filesystem::space(directory.path);
  const auto more = static_cast<int64_t>(space.capacity) + (int64_t{1} << 30);
  const std::string said = error_of([&] { ScratchFile(directory.path, more); });
  EXPECT_TRUE(holds(said, "no room")) << said;
  EXPECT_TRUE(std::filesystem::is_empty(directory.path));
}

// In a child process: the limit can't be raised again, and exceeding it sends a signal that kills.
TEST(ScratchFile, AFileSizeLimitIsAnErrorAndDoesNotKill) {
  const Directory directory;
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit limit{1 << 16, 1 << 16};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    ::_exit(holds(error_of([&] { ScratchFile(directory.path, 1 << 20); }), "ulimit -f") ? 7 : 8);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

TEST(ScratchFile, TheErrorNamesAMissingDirectory) {
  const std::string said = error_of([] { ScratchFile("/no/such/place", 4096); });
  EXPECT_TRUE(holds(said, "/no/such/place")) << said;
}

TEST(ScratchFile, AKillLeavesNothing) {
  const Directory directory;
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const ScratchFile file(directory.path, 1 << 20);
    if (::write(ready[1], "x", 1) == 1) ::pause();
    ::_exit(1);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(std::filesystem::is_empty(directory.path));
  ::close(ready[0]);
  ::close(ready[1]);
}

}  // namespace
}  // namespace fsdp::disk
