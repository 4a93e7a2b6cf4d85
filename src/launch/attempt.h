// Attempt: one start of this node's ranks, from the first fork until all of them have exited and
// the nodes have agreed on what comes next. One thread, one poll loop; nothing in it blocks.
//
// Ranks that die may be replaced within an attempt, if all others can let go of the world and join
// a new one (replace.cpp). That is a restart, too: it has a number of its own.
#pragma once

#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/rank_status.h"
#include "launch/failure.h"
#include "launch/guard.h"
#include "launch/nodes.h"
#include "launch/options.h"
#include "launch/output.h"
#include "launch/processes.h"

namespace fsdp::launch {

// Where rank output goes; the same two streams for all attempts.
struct Screens {
  Screen& out;
  Screen& err;
  Screen& of(int stream) const { return stream == 0 ? out : err; }
};

class Attempt {
 public:
  // `memory`: a folder for the ranks in this host's memory; may be empty.
  Attempt(const Options& options, Nodes& nodes, Signals& signals, Guard& guard, Screens screens,
          std::string memory);

  // On return no process of the ranks' groups is left.
  Verdict run();

  bool interrupted() const { return interrupted_; }  // this launcher received a signal to end
  bool all_ended_well() const;                       // no rank of this node failed
  int code() const;  // if so: 0, or kExitStopped if a rank has saved and isn't done
  void say_failure(const Failure& failure);          // its report

 private:
  using Clock = std::chrono::steady_clock;

  struct RankStream {
    LineSplitter splitter;
    Clock::time_point last_read;
  };
  struct Rank {
    int rank = 0;
    std::string prefix;
    Process process;
    rank_status::SharedPage status;
    std::optional<double> cpu_at_stop;  // CPU seconds of its process when it was told to end
    std::optional<uint32_t> reports;    // that it had written when it was asked for one
    std::array<RankStream, 2> streams;  // stdout, stderr
    LastLines last_lines;
    FileDescriptor log;
    Clock::time_point exited;
    bool fresh = false;  // it replaces one that died, and hasn't joined the others yet

    FileDescriptor& pipe(int stream) { return stream == 0 ? process.out : process.err; }
    bool gone() const { return process.exit && !process.out && !process.err; }
  };

  void open_log(Rank& rank);
  void start_rank(int local, int& exec_errno);
  void start_ranks(const std::vector<int>& locals);
  void wait();
  void take_signals();
  bool held_back(const Rank& rank, int stream) const;
  void read_ranks();
  void read_stream(Rank& rank, int stream, size_t most);
  void read_rest(Rank& rank);
  void show(Rank& rank, int stream, std::string_view piece);
  void notice_exits();
  bool ended_well(const Rank& rank) const;
  void write_screens();
  void stop(int signal);
  void tell_ranks();
  bool reported(std::chrono::milliseconds limit);
  void pass_on(int signal);  // to the ranks; the grace begins
  void force();
  void kill_ranks();
  double grace_s() const;  // seconds from stop() to the kill
  void finish_node();
  void say(const std::string& text);
  int running() const;
  std::string report_folder() const;  // of the flight recorders; empty: none wrote a file

  // --- replace.cpp ---
  bool can_replace() const;
  void lost(Rank& rank, Failure failure);  // it died
  void replace(const Failure& failure);
  void watch_replacing();
  void begin_replacing();
  void watch_waiting();
  void announce_start();
  bool all_joined() const;
  void end_replacing();

  const Options& options_;
  Nodes& nodes_;
  Signals& signals_;
  Guard& guard_;
  Screens screens_;
  const std::string memory_;
  std::vector<Rank> ranks_;
  // While ranks are replaced, the others first let go of the world, then all join a new one.
  // This node follows the stages of all (nodes.h).
  enum class Replacing { kNo, kAsked, kLettingGo, kJoining } replacing_ = Replacing::kNo;
  Clock::time_point replacing_since_;
  bool at_once_ = false;      // a lone rank without a prefix: show incomplete lines immediately
  bool interrupted_ = false;  // this launcher received a signal to end
  bool hurry_ = false;        // a second signal, or the grace is over: wait for nothing
  bool stopping_ = false;
  bool killed_ = false;
  bool ended_ = false;  // nodes_ knows that our ranks have exited
  int stopped_ranks_ = 0;
  int stop_signal_ = 0;  // what tell_ranks() sends
  bool told_ = false;    // the ranks have been sent it
  Clock::time_point stopped_at_;
  Clock::time_point asked_at_;  // for reports; zero: not yet
  Clock::time_point killed_at_;
};

}  // namespace fsdp::launch
