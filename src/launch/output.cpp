#include "launch/output.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/format.h"

namespace fsdp::launch {

void LineSplitter::feed(std::string_view bytes, std::vector<std::string>& pieces) {
  // A "\r" at the end of `rest_` waits for the next byte, because "\r\n" is one line end.
  if (!rest_.empty() && rest_.back() == '\r' && !bytes.empty() && bytes.front() != '\n') {
    pieces.push_back(take_rest());
  }
  while (!bytes.empty()) {
    size_t end = bytes.find_first_of("\r\n");
    bool ended = end != std::string_view::npos;
    if (ended && bytes[end] == '\r') {
      if (end + 1 == bytes.size()) {
        ended = false;
      } else if (bytes[end + 1] == '\n') {
        ++end;
      }
    }
    size_t room = kLongest - rest_.size();
    size_t wanted = ended ? end + 1 : bytes.size();
    size_t taken = std::min(wanted, room);
    rest_.append(bytes.substr(0, taken));
    bytes.remove_prefix(taken);
    if ((ended && taken == wanted) || rest_.size() >= kLongest) pieces.push_back(take_rest());
  }
}

std::string LineSplitter::take_rest() {
  return std::exchange(rest_, {});
}

void LastLines::add(std::string_view piece) {
  char end = piece.empty() ? last_end_ : piece.back();
  if (end != '\n' && end != '\r') end = 0;
  while (!piece.empty() && (piece.back() == '\n' || piece.back() == '\r')) piece.remove_suffix(1);
  if (last_end_ == 0 && !lines_.empty()) {
    lines_.back() += piece;
  } else if (last_end_ == '\r' && !lines_.empty()) {
    if (!piece.empty()) lines_.back() = piece;
  } else {
    lines_.emplace_back(piece);
    if (lines_.size() > kCount) lines_.pop_front();
  }
  if (lines_.back().size() > kLongest) {
    lines_.back().resize(kLongest);
    lines_.back() += "...";
  }
  last_end_ = end;
}

std::vector<std::string> LastLines::lines() const {
  return {lines_.begin(), lines_.end()};
}

std::string rank_prefix(int rank, int world) {
  return formatted("[{:>{}}] ", rank, std::to_string(world - 1).size());
}

void Screen::end_open_line(int next) {
  if (live_ != kNone && live_ != next) {
    writer_.push(colour_ ? "\r\x1b[K" : "\n");
    live_ = open_ = kNone;
  }
  if (open_ != kNone && open_ != next) {
    writer_.push("\n");
    open_ = kNone;
  }
}

void Screen::show(int rank, const std::string& prefix, std::string_view piece, int stream) {
  if (piece.empty()) return;
  if (writer_.overfull()) {
    dropped_ += piece.size();
    return;
  }
  own_up();
  const int source = 2 * rank + stream;
  end_open_line(source);
  std::string text;
  if (open_ != source && !prefix.empty() && piece != "\r") {
    // No red, which marks errors.
    static constexpr std::array colours = {"36", "33", "35", "32", "34",
                                           "96", "93", "95", "92", "94"};
    text = colour_
               ? "\x1b[" + std::string(colours[rank % colours.size()]) + "m" + prefix + "\x1b[0m"
               : prefix;
  }
  bool rewrites = piece.back() == '\r';
  if (rewrites && colour_) {  // clear the rest of a longer previous line
    text.append(piece.substr(0, piece.size() - 1));
    text += "\x1b[K\r";
  } else {
    text.append(piece);
  }
  bool has_text = piece.size() > 1 || open_ == source;
  open_ = rewrites || piece.back() == '\n' ? kNone : source;
  if (piece.back() == '\n')
    live_ = kNone;
  else if (rewrites && has_text)
    live_ = source;
  writer_.push(std::move(text));
}

void Screen::own_up() {
  if (dropped_ == 0) return;
  end_open_line(kNone);
  writer_.push(formatted("fsdp: {} bytes of output were dropped here, because nobody read them.\n",
                         std::exchange(dropped_, 0)));
}

void Screen::say(const std::string& lines) {
  own_up();
  end_open_line(kNone);
  if (colour_) writer_.push("\r\x1b[K");  // clears a ^C that the terminal echoed
  writer_.push(lines);
}

}  // namespace fsdp::launch
