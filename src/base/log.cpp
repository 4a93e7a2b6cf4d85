#include "base/log.h"

#include <atomic>
#include <cstdio>
#include <exception>

#include "base/terminal.h"

namespace fsdp::log {
namespace {

std::atomic<int> g_rank{-1};

void write(const char* colour, const char* kind, const std::string& text) {
  std::string line = "fsdp: ";
  if (int rank = g_rank.load(); rank >= 0) line += "rank " + std::to_string(rank) + ": ";
  if (*kind) line += paint(STDERR, colour, kind) + ": ";
  line += text + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);  // one write, so that ranks do not mix lines
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

void error(const std::exception& failure) {
  write("31", "error", failure.what());
}

}  // namespace fsdp::log
