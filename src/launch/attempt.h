// Attempt: one start of this node's ranks, from the first fork until all of them have exited and
// the nodes have agreed on what comes next. One thread, one poll loop; nothing in it blocks.
#pragma once

#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/rank_status.h"
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
  Screen& of(int stream) { return stream == 0 ? out : err; }
};

class Attempt {
 public:
  Attempt(const Options& options, Nodes& nodes, Signals& signals, Guard& guard, Screens screens);

  // On return no process of the ranks' groups is left.
  Verdict run();

  bool interrupted() const { return interrupted_; }     // this launcher received a signal to end
  bool all_clean() const;                               // every rank of this node exited with 0
  int stopped_ranks() const { return stopped_ranks_; }  // running when a failure ended the run

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
    std::array<RankStream, 2> streams;  // stdout, stderr
    LastLines last_lines;
    FileDescriptor log;
    Clock::time_point exited;

    FileDescriptor& pipe(int stream) { return stream == 0 ? process.out : process.err; }
    bool gone() const { return process.exit && !process.out && !process.err; }
  };

  void open_logs();
  void start_ranks();
  void wait();
  void take_signals();
  void read_ranks();
  void read_stream(Rank& rank, int stream, size_t most);
  void show(Rank& rank, int stream, std::string_view piece);
  void notice_exits();
  void write_screens();
  void stop(int signal);
  void force();
  void kill_ranks();
  double grace_s() const;  // seconds from stop() to the kill
  void finish_node();
  void say(const std::string& text);
  int running() const;

  const Options& options_;
  Nodes& nodes_;
  Signals& signals_;
  Guard& guard_;
  Screens screens_;
  std::vector<Rank> ranks_;
  bool at_once_ = false;      // a lone rank without a prefix: show incomplete lines immediately
  bool interrupted_ = false;  // this launcher received a signal to end
  bool hurry_ = false;        // a second signal, or the grace is over: wait for nothing
  bool stopping_ = false;
  bool killed_ = false;
  bool ended_ = false;  // nodes_ knows that our ranks have exited
  int stopped_ranks_ = 0;
  int stop_signal_ = 0;  // what stop() sent
  Clock::time_point stopped_at_;
  Clock::time_point killed_at_;
};

}  // namespace fsdp::launch
