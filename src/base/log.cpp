#include "base/log.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <utility>

#include "base/format.h"
#include "base/mutex.h"
#include "base/printable.h"
#include "base/rank_status.h"
#include "base/terminal.h"

namespace fsdp::log {
namespace {

std::atomic<int> g_rank{-1};
std::atomic<bool> g_live_line{false};
Mutex g_mutex;
std::string g_printed FSDP_GUARDED_BY(g_mutex);  // by error()

void write(const char* colour, const char* kind, const std::string& text) {
  std::string line = has_live_line() && terminal_width(STDERR) > 0 ? "\r\x1b[Kfsdp: " : "fsdp: ";
  if (int rank = g_rank.load(); rank >= 0) line += formatted("rank {}: ", rank);
  if (*kind) line += paint(STDERR, colour, kind) + ": ";
  line += printable(text) + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);  // one write: lines of ranks don't interleave
}

}  // namespace

void set_rank(int rank, int world) {
  g_rank = world > 1 ? rank : -1;
}

void info(const std::string& text) {
  write("", "", text);
}

void warn(const std::string& text) {
  write("33", "warning", text);
}

void set_live_line(bool drawn) {
  g_live_line = drawn;
}

bool has_live_line() {
  return g_live_line;
}

void error(const std::exception& failure) {
  rank_status::set_failing();  // the launcher reads what follows, even if nobody reads the launcher
  const std::string text = plain(failure);
  {
    Lock lock(g_mutex);
    if (std::exchange(g_printed, text) == text) return;
  }
  write("31", "error", text);
}

std::string plain(const std::exception& failure) {
  const std::string text = failure.what();
  return text.substr(0, std::min(text.find("\nException raised from "), text.find("\nframe #")));
}

}  // namespace fsdp::log
