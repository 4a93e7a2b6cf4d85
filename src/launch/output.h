// What ranks print, on its way to the screen: cut into lines, prefixed by rank, never mixed within
// a line; and the last lines of each rank, kept for the day it fails.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "launch/writer.h"

namespace fsdp::launch {

// Cuts a stream of bytes into pieces. A piece ends in "\n", "\r\n" or, for progress bars that
// rewrite their line, "\r"; or it is a part of a line, when that grew past kLongest or take_rest()
// was called. Bytes pass unchanged, valid text or not.
class LineSplitter {
 public:
  static constexpr size_t kLongest = 64 * 1024;

  // Appends the pieces that `bytes` completes to `pieces`.
  void feed(std::string_view bytes, std::vector<std::string>& pieces);
  std::string take_rest();  // the unfinished line, possibly empty
  bool empty() const { return rest_.empty(); }

 private:
  std::string rest_;
};

// The last lines of a rank, both streams as they came; "\r" rewrites the line as on a screen.
class LastLines {
 public:
  static constexpr size_t kCount = 20;
  static constexpr size_t kLongest = 500;  // bytes kept of a line

  void add(std::string_view piece);
  std::vector<std::string> lines() const;

 private:
  std::deque<std::string> lines_;
  char last_end_ = '\n';  // how the last piece ended: '\n', '\r', or 0 for a line still open
};

// "[3] ", padded to the width of the largest rank: "[ 3] " in a world of 12.
std::string rank_prefix(int rank, int world);

// Where pieces of several ranks meet: one of our output streams. When a rank has left a line open
// and another rank writes, the line is ended first; the prefix comes once a line.
class Screen {
 public:
  // `colour`: SGR colours are welcome.
  Screen(Writer& writer, bool colour) : writer_(writer), colour_(colour) {}

  // A piece of `rank`; `prefix` may be empty.
  void show(int rank, const std::string& prefix, std::string_view piece);
  // The launcher's own words: whole lines.
  void say(const std::string& lines);
  bool colour() const { return colour_; }
  Writer& writer() { return writer_; }

 private:
  void end_open_line(int next);

  static constexpr int kNobody = -1;
  Writer& writer_;
  bool colour_;
  int open_ = kNobody;  // whose line is not ended
};

}  // namespace fsdp::launch
