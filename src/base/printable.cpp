#include "base/printable.h"

#include <algorithm>

#include "base/format.h"

namespace fsdp::base {
namespace {

constexpr size_t kLongestShownLine = 4'000, kShownEnd = 1'000;  // bytes
constexpr size_t kMostShownLines = 1'000, kShownLastLines = 200;

bool is_tail(char c) {
  return (static_cast<unsigned char>(c) & 0xc0) == 0x80;
}

// The bytes of the character that `text` begins with, and the character; 0 bytes if it isn't UTF-8.
struct Decoded {
  size_t bytes = 0;
  uint32_t code = 0;
};

Decoded decode(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  if (first < 0x80) return {1, first};
  const size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < bytes) return {};
  uint32_t code = first & (0x7fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if (!is_tail(text[i])) return {};
    code = code << 6 | (static_cast<unsigned char>(text[i]) & 0x3f);
  }
  constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool good =
      code >= kSmallest[bytes] && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff);
  return good ? Decoded{bytes, code} : Decoded{};
}

bool acts_on_a_terminal(uint32_t code) {
  const bool control = code < 0x20 || (code >= 0x7f && code < 0xa0);
  const bool direction = (code >= 0x200e && code <= 0x200f) || (code >= 0x2028 && code <= 0x202e) ||
                         (code >= 0x2066 && code <= 0x2069);
  return (control && code != '\n' && code != '\t') || direction;
}

std::string escaped(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Decoded next = decode(text);
    const size_t bytes = std::max<size_t>(next.bytes, 1);
    if (next.bytes > 0 && !acts_on_a_terminal(next.code)) {
      out += text.substr(0, bytes);
    } else {
      for (const char c : text.substr(0, bytes))
        out += formatted("\\x{:02x}", static_cast<unsigned char>(c));
    }
    text.remove_prefix(bytes);
  }
  return out;
}

// Moves back to the beginning of a character.
size_t boundary(std::string_view line, size_t at) {
  for (int i = 0; i < 3 && at > 0 && is_tail(line[at]); ++i) --at;
  return at;
}

std::string shown_line(std::string_view line) {
  std::string shown;
  if (line.size() <= kLongestShownLine) {
    shown = escaped(line);
  } else {  // what is cut out isn't escaped: it may be gigabytes
    const size_t begin = boundary(line, kLongestShownLine - kShownEnd - 100);
    const size_t end = boundary(line, line.size() - kShownEnd);
    shown = escaped(line.substr(0, begin)) + formatted(" [… {} bytes …] ", end - begin) +
            escaped(line.substr(end));
  }
  return shown.size() <= kLongestShownLine ? shown : shown_line(shown);  // escapes make it longer
}

}  // namespace

std::string printable(std::string_view text) {
  const auto lines = static_cast<size_t>(std::count(text.begin(), text.end(), '\n')) + 1;
  // The lines that are left out, if there are too many.
  const size_t first = kMostShownLines - kShownLastLines - 1;
  const size_t last = lines > kMostShownLines ? lines - kShownLastLines : first;
  std::string out;
  for (size_t number = 0; number < lines; ++number) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    if (number == first && last > first) out += formatted("[… {} lines …]\n", last - first);
    if (number >= first && number < last) continue;
    out += shown_line(line);
    if (number + 1 < lines) out += '\n';
  }
  return out;
}

}  // namespace fsdp::base
