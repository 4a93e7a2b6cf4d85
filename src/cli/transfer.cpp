#include "cli/transfer.h"

#include <algorithm>
#include <cmath>
#include <iostream>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/table.h"
#include "base/terminal.h"
#include "fsdp/error.h"

namespace fsdp::cli {

using std::chrono::steady_clock;

Transfer::Transfer(std::string verb, int64_t total)
    : verb_(std::move(verb)),
      total_(total),
      width_(terminal_width(STDERR)),
      begun_(steady_clock::now()),
      shown_(begun_) {}

Transfer::~Transfer() {
  if (drawn_) std::cerr << "\r\x1b[K" << std::flush;
}

void Transfer::advance(int64_t bytes) {
  if (const int signal = train::StopSignals::received())
    throw CodedError(static_cast<ExitCode>(kExitSignal + signal),
                     formatted("interrupted while {}.", verb_), "the partial output was removed.");
  done_ += bytes;
  const auto now = steady_clock::now();
  if (width_ == 0 || now - shown_ < std::chrono::milliseconds(100)) return;
  shown_ = now;
  draw();
}

void Transfer::draw() {
  const double seconds = std::chrono::duration<double>(shown_ - begun_).count();
  const double share = total_ > 0 ? static_cast<double>(done_) / static_cast<double>(total_) : 1.0;
  std::string line = formatted("{}  {:.0f} % of {}, {}/s", verb_, 100 * share,
                               human_bytes(static_cast<double>(total_)),
                               human_bytes(static_cast<double>(done_) / seconds));
  line.resize(std::min(line.size(), static_cast<size_t>(std::max(1, width_ - 1))));
  std::cerr << "\r\x1b[K" << line << std::flush;
  drawn_ = true;
}

int64_t parse_bytes(const std::string& text) {
  if (const auto bytes = base::parse_bytes(text, /*kilo=*/1000)) return *bytes;
  throw CodedError(kExitUsage, formatted("\"{}\" isn't a size.", text),
                   "write 5GB, 500MB or 64MiB.");
}

}  // namespace fsdp::cli
