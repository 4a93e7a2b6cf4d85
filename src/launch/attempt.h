// Attempt: one start of this node's ranks, from the first fork until every one of them is gone and
// all nodes have agreed on what comes next. One thread, one poll loop; nothing in it blocks.
#pragma once

#include <array>
#include <chrono>
#include <string>
#include <vector>

#include "launch/guard.h"
#include "launch/nodes.h"
#include "launch/options.h"
#include "launch/output.h"
#include "launch/processes.h"

namespace fsdp::launch {

// Where the output of ranks goes; the same two streams for all attempts.
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

  bool interrupted() const { return interrupted_; }   // this launcher was told to end
  bool all_clean() const;                             // every rank of this node exited with 0
  int ended_others() const { return ended_others_; }  // ranks that ran when a failure ended the run

 private:
  using Clock = std::chrono::steady_clock;

  struct Stream {
    LineSplitter splitter;
    Clock::time_point last_read;
  };
  struct Rank {
    int rank = 0;
    std::string prefix;
    Process process;
    std::array<Stream, 2> streams;  // stdout, stderr
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
  void finish_node();
  void say(const std::string& text);
  int running() const;

  const Options& options_;
  Nodes& nodes_;
  Signals& signals_;
  Guard& guard_;
  Screens screens_;
  std::vector<Rank> ranks_;
  bool at_once_ = false;      // a lone rank without a prefix: lines need not be whole
  bool interrupted_ = false;  // this launcher was told to end
  bool hurry_ = false;        // and a second time, or the grace is over: wait for nothing
  bool stopping_ = false;
  bool killed_ = false;
  bool ended_ = false;  // nodes_ was told that our ranks are gone
  int ended_others_ = 0;
  Clock::time_point stopped_at_;
  Clock::time_point kill_at_;
};

}  // namespace fsdp::launch
