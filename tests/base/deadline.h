// A deadline for code that hung once: SIGALRM ends the process, and with it the test. It is far
// beyond what a busy machine needs.
#pragma once

#include <unistd.h>

namespace fsdp::test {

class WithDeadline {
 public:
  explicit WithDeadline(unsigned seconds = 240) { ::alarm(seconds); }
  ~WithDeadline() { ::alarm(0); }
  WithDeadline(const WithDeadline&) = delete;
  WithDeadline& operator=(const WithDeadline&) = delete;
};

}  // namespace fsdp::test
