// Crash: what this process does when it crashes, and when it is asked for a report (SIGUSR2).
//
// One owner of these signals. The handlers of before run after ours: a crash ends the process as it
// would have without us, with the same signal and the same core file.
#pragma once

namespace fsdp::crash {

// `why` is a signal's name, or the text of an exception that nothing catches.
struct Hooks {
  // In the thread that crashed, often in a signal handler: only async-signal-safe calls.
  void (*crashed)(const char* why) = nullptr;
  // After SIGUSR2, on a thread of its own. `by_parent`: the process that started this one sent it.
  void (*asked)(bool by_parent) = nullptr;
};

// From now on SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT and std::terminate call hooks.crashed, and
// SIGUSR2 calls hooks.asked, unless the program has a handler of its own for it. Later calls only
// replace the hooks. A child that forks calls none of them.
void install(Hooks hooks);

bool answers();  // this process takes SIGUSR2 as a request

}  // namespace fsdp::crash
