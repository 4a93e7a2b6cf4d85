#include "train/stop.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

namespace fsdp::train {
namespace {

constexpr long kSameSignalMs = 300;  // shells and `timeout` may send one Ctrl-C twice

volatile sig_atomic_t received_signal = 0;
timespec received_at{};
struct sigaction before_int, before_term;

long milliseconds_since(const timespec& then) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (now.tv_sec - then.tv_sec) * 1000 + (now.tv_nsec - then.tv_nsec) / 1'000'000;
}

void on_signal(int signal) {
  if (received_signal == 0) {
    clock_gettime(CLOCK_MONOTONIC, &received_at);
    received_signal = signal;
  } else if (milliseconds_since(received_at) > kSameSignalMs) {
    _exit(128 + signal);
  }
}

}  // namespace

StopSignals::StopSignals() {
  received_signal = 0;
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, &before_int);
  sigaction(SIGTERM, &action, &before_term);
}

StopSignals::~StopSignals() {
  sigaction(SIGINT, &before_int, nullptr);
  sigaction(SIGTERM, &before_term, nullptr);
}

int StopSignals::received() {
  return received_signal;
}

}  // namespace fsdp::train
