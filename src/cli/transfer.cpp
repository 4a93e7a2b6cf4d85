#include "cli/transfer.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <iostream>

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
  if (train::StopSignals::received() != 0)
    throw Error(formatted("interrupted while {}.", verb_), "the partial output was removed.");
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
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  std::string unit;
  for (; *end; ++end) unit += static_cast<char>(std::toupper(static_cast<unsigned char>(*end)));
  constexpr const char* kPrefixes = "KMGT";
  double scale = unit.empty() || unit == "B" ? 1 : 0;
  for (int i = 0; i < 4; ++i) {
    const std::string prefix(1, kPrefixes[i]);
    if (unit == prefix || unit == prefix + "B") scale = std::pow(1000.0, i + 1);
    if (unit == prefix + "IB") scale = std::pow(1024.0, i + 1);
  }
  const double bytes = value * scale;
  if (!std::isfinite(bytes) || bytes < 1 || bytes > 9e18)
    throw Error(formatted("\"{}\" isn't a size.", text), "write 5GB, 500MB or 64MiB.");
  return static_cast<int64_t>(bytes);
}

}  // namespace fsdp::cli
