// Rank status: what a rank is doing, readable from outside even when all of its threads hang.
//
// A rank writes its step, phase, unit and last collective into one page of memory. The launcher
// creates that page, passes it down as an inherited descriptor (FSDP_STATUS_FD) and reads it when
// it has to kill the rank. Without a launcher the page is private; the trainer's own watchdog reads
// it then. A write is a few stores: no lock, no system call. Any thread may write. If two write the
// same field at once, one of the two values is dropped.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace fsdp::rank_status {

inline constexpr const char* kVariable = "FSDP_STATUS_FD";

struct Page;  // the memory itself

struct Status {
  pid_t pid = 0;               // of the process that reports; 0: none has reported
  int64_t step = 0;            // under way, from 1 on; 0: unknown
  std::string phase;           // "forward", "evaluation"; empty: unknown
  std::string unit;            // last unit used in that phase, and by which operator
  std::string collective;      // last one begun
  bool in_collective = false;  // it hasn't finished
  double grace_s = 0;          // what the rank asks for after a signal; 0: nothing
  double age_s = 0;            // since the last report
  bool failing = false;        // it prints why it fails
  bool recovers = false;       // see set_recovers()
  int waits_for = 0, joined = 0;
  bool answers = false;       // SIGUSR2 makes it write what it has recorded
  uint32_t reports = 0;       // how often it has
  std::string report_folder;  // where; empty: nowhere yet
};

// A start of all ranks. The first one is in a rank's environment; one that survives the death of
// others is told the next by the launcher.
struct Start {
  int attempt = 0;        // 0: the first
  std::string variables;  // that differ from the rank's environment, as lines NAME=VALUE
};

// The Status of this process, in memory of the caller's: for signal handlers.
struct Snapshot {
  int64_t step = 0;
  char phase[65] = {};
  char unit[129] = {};
  char collective[161] = {};
  bool in_collective = false;
};

// --- for the rank ---

void set_step(int64_t step);
void set_phase(std::string_view phase);  // also clears the unit
void set_unit(std::string_view unit, std::string_view used_by);
// Seconds that the launcher should wait for this rank after a signal.
void set_grace(double seconds);
void set_answers(bool answers);
// A report about this rank is in `folder`; empty: it was asked for one and has no other. May be
// called in a signal handler.
void add_report(const char* folder) noexcept;

// This rank fails and prints why; the launcher reads that in any case.
void set_failing();

// A collective, from its begin to its end on this thread.
class Collective {
 public:
  Collective(std::string_view operation, int64_t elements, std::string_view label);
  ~Collective();
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

 private:
  uint64_t number_;
};

// When other ranks die, this one doesn't end: it lets go of the world, says that it waits for an
// attempt, and joins that when it is announced.
void set_recovers(bool recovers);
void set_waits_for(int attempt);
void set_joined(int attempt);
Start announced();  // the last one
// The launcher says so: a rank died, perhaps on another host, and this one hasn't reported yet that
// it waits. May be called from any thread.
bool told_to_let_go();

Status current();              // this process's own
int64_t step();                // likewise
Snapshot snapshot() noexcept;  // may be called in a signal handler
bool launcher_is_stopping();   // the launcher is ending this rank and kills it after the grace

// --- for the launcher ---

class SharedPage {
 public:
  // Without memory for it fd() is -1, and the rank reports nothing.
  SharedPage();
  SharedPage(SharedPage&& other) noexcept;
  SharedPage& operator=(SharedPage&& other) noexcept;
  ~SharedPage();

  int fd() const { return fd_; }  // close-on-exec; FSDP_STATUS_FD is its number
  void close_fd();                // once the rank has inherited it
  Status read() const;
  void announce_stop();  // see launcher_is_stopping()
  void announce(const Start& start);
  void tell_to_let_go(int attempt);  // of the world before it; see told_to_let_go()

 private:
  int fd_ = -1;
  Page* page_ = nullptr;
};

// --- for reports ---

// The default grace: the larger of 30 s and three times the slowest recent step.
inline constexpr double kLeastGrace = 30;
double default_grace(double slowest_step_s);

// "running", "sleeping in futex_wait", "blocked in the kernel", "stopped": the main thread, as far
// as /proc tells; "gone" once it has exited.
std::string thread_state(pid_t pid);
std::optional<double> cpu_seconds(pid_t pid);  // of all threads so far; nullopt: unknown

// "step 12, backward, unit "layers.7" (backward), in all_gather of 512 elements; last report 52 s
// ago; main thread running, 30.1 s of CPU time since the signal". `cpu_before`: cpu_seconds() at
// the signal.
std::string whereabouts(const Status& status, pid_t pid, std::optional<double> cpu_before);

}  // namespace fsdp::rank_status
