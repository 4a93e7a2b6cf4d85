#include "chat/text.h"

#include <algorithm>

namespace fsdp::chat {

Text::Text(std::string bytes, Origin origin) : bytes_(std::move(bytes)) {
  if (!bytes_.empty()) runs_.push_back({bytes_.size(), origin});
}

void Text::append(std::string_view bytes, Origin origin) {
  if (bytes.empty()) return;
  bytes_ += bytes;
  if (!runs_.empty() && runs_.back().origin == origin)
    runs_.back().end = bytes_.size();
  else
    runs_.push_back({bytes_.size(), origin});
}

void Text::append(const Text& other) {
  size_t at = 0;
  for (const Run& run : other.runs_) {
    append(std::string_view(other.bytes_).substr(at, run.end - at), run.origin);
    at = run.end;
  }
}

Text Text::part(size_t from, size_t to) const {
  Text result;
  to = std::min(to, bytes_.size());
  if (from >= to) return result;
  auto run = std::upper_bound(runs_.begin(), runs_.end(), from,
                              [](size_t at, const Run& one) { return at < one.end; });
  for (size_t at = from; at < to; ++run) {
    const size_t end = std::min(to, run->end);
    result.append(std::string_view(bytes_).substr(at, end - at), run->origin);
    at = end;
  }
  return result;
}

Origin stronger(Origin a, Origin b) {
  return b.part > a.part ? b : a;
}

Origin Text::origin() const {
  Origin strongest;
  for (const Run& run : runs_) strongest = stronger(strongest, run.origin);
  return strongest;
}

void Text::write_in(int32_t turn, bool generated) {
  std::vector<Run> merged;
  for (Run& run : runs_) {
    if (run.origin.turn < 0) run.origin.turn = turn;
    run.origin.generated = run.origin.generated || generated;
    if (!merged.empty() && merged.back().origin == run.origin)
      merged.back().end = run.end;
    else
      merged.push_back(run);
  }
  runs_ = std::move(merged);
}

size_t count_codes(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return !continues_code(c); }));
}

std::vector<size_t> code_starts(std::string_view text) {
  std::vector<size_t> starts;
  for (size_t i = 0; i < text.size(); ++i)
    if (!continues_code(text[i])) starts.push_back(i);
  starts.push_back(text.size());
  return starts;
}

char32_t code_at(std::string_view text, size_t at) {
  const auto byte = static_cast<unsigned char>(text[at]);
  if (byte < 0x80) return byte;
  char32_t code = byte & (byte < 0xe0 ? 0x1f : byte < 0xf0 ? 0x0f : 0x07);
  while (++at < text.size() && continues_code(text[at]))
    code = code << 6 | (static_cast<unsigned char>(text[at]) & 0x3f);
  return code;
}

void put_code(std::string& out, char32_t code) {
  const auto put = [&](char32_t byte) { out += static_cast<char>(byte); };
  if (code < 0x80) return put(code);
  if (code < 0x800) {
    put(0xc0 | code >> 6);
  } else {
    if (code < 0x10000) {
      put(0xe0 | code >> 12);
    } else {
      put(0xf0 | code >> 18);
      put(0x80 | (code >> 12 & 0x3f));
    }
    put(0x80 | (code >> 6 & 0x3f));
  }
  put(0x80 | (code & 0x3f));
}

bool is_white(char32_t code) {
  return code == 0x20 || (code >= 0x09 && code <= 0x0d) || (code >= 0x1c && code <= 0x1f) ||
         code == 0x85 || code == 0xa0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200a) ||
         code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f || code == 0x3000;
}

size_t skip_white(std::string_view text, size_t at) {
  while (at < text.size() && is_white(code_at(text, at))) {
    do ++at;
    while (at < text.size() && continues_code(text[at]));
  }
  return at;
}

size_t trimmed_end(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    size_t begin = end - 1;
    while (begin > 0 && continues_code(text[begin])) --begin;
    if (!is_white(code_at(text, begin))) break;
    end = begin;
  }
  return end;
}

}  // namespace fsdp::chat
