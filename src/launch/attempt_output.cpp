// Attempt's part that reads what ranks write, into their logs and onto our screens.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/format.h"
#include "launch/attempt.h"

namespace fsdp::launch {
namespace {

using namespace std::chrono_literals;

constexpr auto kPartialLine = 1s;  // an incomplete line is shown after this much silence
constexpr auto kOpenPipe = 1s;     // a pipe that a rank's orphans hold open is closed after this
// For stderr, beyond what makes a stuck reader hold ranks back.
constexpr size_t kErrorRoom = 1 << 20;

}  // namespace

// Whether a rank must wait because the reader of our output is slow or stuck. Not one that ends: it
// would never get to its end. What has no room then is dropped.
bool Attempt::held_back(const Rank& rank, int stream) const {
  const Writer& writer = screens_.of(stream).writer();
  if (hurry_ || stopping_ || !writer.full(stream == 1 ? kErrorRoom : 0)) return false;
  return !rank.status.read().failing;
}

void Attempt::read_ranks() {
  auto now = Clock::now();
  for (auto& rank : ranks_) {
    for (int stream : {0, 1}) {
      if (!rank.pipe(stream)) continue;
      const bool held = held_back(rank, stream);
      if (!held) read_stream(rank, stream, 64 * 1024);
      // The rank has exited, but a child that it left behind holds its pipe.
      if (rank.pipe(stream) && rank.process.exit &&
          (hurry_ || (!held && now - rank.exited > kOpenPipe))) {
        read_stream(rank, stream, 1024 * 1024);
        rank.pipe(stream).close();
      }
      auto& [splitter, last_read] = rank.streams[stream];
      bool due = at_once_ || !rank.pipe(stream) || now - last_read > kPartialLine;
      if (due && !splitter.empty()) show(rank, stream, splitter.take_rest());
    }
  }
}

void Attempt::read_stream(Rank& rank, int stream, size_t most) {
  char buffer[64 * 1024];
  std::vector<std::string> pieces;
  while (most > 0 && rank.pipe(stream)) {
    ssize_t got = read(rank.pipe(stream).get(), buffer, std::min(most, sizeof buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
      rank.pipe(stream).close();
      return;
    }
    most -= got;
    rank.streams[stream].last_read = Clock::now();
    if (rank.log) {
      ssize_t written = write(rank.log.get(), buffer, got);
      if (written != got) {
        say(formatted("fsdp: the log of rank {} ends here: {}.\n", rank.rank,
                      written < 0 ? std::strerror(errno) : "the disk is full"));
        rank.log.close();
      }
    }
    pieces.clear();
    rank.streams[stream].splitter.feed({buffer, static_cast<size_t>(got)}, pieces);
    for (const auto& piece : pieces) show(rank, stream, piece);
  }
}

// What a rank that has exited left in its pipes.
void Attempt::read_rest(Rank& rank) {
  for (int stream : {0, 1}) {
    read_stream(rank, stream, 1024 * 1024);
    const std::string rest = rank.streams[stream].splitter.take_rest();
    if (!rest.empty()) show(rank, stream, rest);
  }
}

void Attempt::show(Rank& rank, int stream, std::string_view piece) {
  rank.last_lines.add(piece);
  screens_.of(stream).show(rank.rank, rank.prefix, piece, stream);
}

}  // namespace fsdp::launch
