// Rank output on its way to the screen: split into lines, prefixed with the rank, never mixed
// within a line. Also keeps the last lines of each rank for failure reports.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "launch/writer.h"

namespace fsdp::launch {

// Splits a stream of bytes into pieces. A piece ends in "\n", "\r\n" or, for progress bars that
// rewrite their line, "\r". A line longer than kLongest, or one cut by take_rest(), comes in parts.
// Bytes pass unchanged, valid text or not.
class LineSplitter {
 public:
  static constexpr size_t kLongest = 64 * 1024;

  // Appends the pieces that `bytes` completes to `pieces`.
  void feed(std::string_view bytes, std::vector<std::string>& pieces);
  std::string take_rest();  // the incomplete line, possibly empty
  bool empty() const { return rest_.empty(); }

 private:
  std::string rest_;
};

// The last lines of a rank, both streams in arrival order; "\r" rewrites the line as on a screen.
class LastLines {
 public:
  static constexpr size_t kCount = 20;
  static constexpr size_t kLongest = 500;  // bytes kept per line

  void add(std::string_view piece);
  std::vector<std::string> lines() const;

 private:
  std::deque<std::string> lines_;
  char last_end_ = '\n';  // how the last piece ended: '\n', '\r', or 0 for a line still open
};

// "[3] ", padded to the width of the largest rank: "[ 3] " in a world of 12.
std::string rank_prefix(int rank, int world);

// Merges the pieces of several ranks into one of our output streams. If a rank left a line open and
// another rank writes, the line is ended first. A live line (one that is redrawn by "\r") is
// cleared instead on a terminal with colours: its rank draws it again. Each line gets its prefix
// once. What ranks write is dropped while their last 8 MiB wait for a reader, and a line says so.
class Screen {
 public:
  // `colour`: whether to use SGR colours.
  Screen(Writer& writer, bool colour) : writer_(writer), colour_(colour) {}

  // A piece of `rank`; `prefix` may be empty. `stream`: 0 for its stdout, 1 for its stderr.
  void show(int rank, const std::string& prefix, std::string_view piece, int stream = 0);
  // Output of the launcher itself, in whole lines.
  void say(const std::string& lines);
  bool colour() const { return colour_; }
  Writer& writer() { return writer_; }

 private:
  void end_open_line(int next);
  void own_up();  // to what was dropped

  static constexpr int kNone = -1;
  Writer& writer_;
  bool colour_;
  int open_ = kNone;    // the rank and stream whose line is incomplete
  int live_ = kNone;    // the rank and stream whose live line is shown
  size_t dropped_ = 0;  // bytes since the last line about them
};

}  // namespace fsdp::launch
