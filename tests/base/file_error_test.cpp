// What is said about failed calls on files, and the signal that a large file sends.
#include "base/file_error.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <set>

namespace fsdp::base {
namespace {

TEST(FileErrors, HaveHintsOfTheirOwn) {
  std::set<std::string> seen;
  for (int code : {ENOSPC, EDQUOT, EFBIG, EMFILE, ENFILE, EROFS, EACCES, ENOENT, EIO, ESTALE}) {
    const std::string hint = file_hint(code);
    EXPECT_TRUE(hint.ends_with('.')) << hint;
    EXPECT_TRUE(seen.insert(hint).second) << errno_text(code);
  }
  EXPECT_NE(file_hint(EMFILE).find("ulimit -n"), std::string::npos);
  EXPECT_NE(file_hint(EFBIG).find("ulimit -f"), std::string::npos);
  EXPECT_NE(file_hint(EDQUOT).find("quota"), std::string::npos);
  EXPECT_FALSE(file_hint(EDOM).empty());
}

// In a child: the limit can't be raised again. 0: the write failed with EFBIG.
int exit_of_large_write(void (*handler)(int)) {
  const pid_t child = fork();
  if (child == 0) {
    ::signal(SIGXFSZ, handler);
    ignore_size_signal();
    const rlimit limit{8, 8};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    char name[] = "/tmp/fsdp-size-XXXXXX";
    const int file = ::mkstemp(name);
    ::unlink(name);
    const bool small = ::write(file, "12345678", 8) == 8;
    _exit(small && ::write(file, "9", 1) < 0 && errno == EFBIG ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST(FileErrors, ALimitOnFileSizesDoesNotKill) {
  EXPECT_EQ(exit_of_large_write(SIG_DFL), 0);
  EXPECT_EQ(exit_of_large_write([](int) { _exit(7); }), 7) << "a program's own handler stays";
}

}  // namespace
}  // namespace fsdp::base
