// The writing half of pickle.h.
#include <bit>
#include <cstdint>
#include <limits>

#include "checkpoint/pickle.h"

namespace fsdp::checkpoint::pickle {

Writer::Writer() : out_("\x80\x02") {}

void Writer::little(uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out_ += static_cast<char>(value >> (8 * i) & 0xff);
}

bool Writer::known(const std::string& key) {
  const auto found = memo_.find(key);
  if (found == memo_.end()) return false;
  if (found->second < 256) {
    out_ += 'h';
    little(found->second, 1);
  } else {
    out_ += 'j';
    little(found->second, 4);
  }
  return true;
}

void Writer::remember(const std::string& key) {
  const auto index = static_cast<uint32_t>(memo_.size());
  memo_.emplace(key, index);
  if (index < 256) {
    out_ += 'q';
    little(index, 1);
  } else {
    out_ += 'r';
    little(index, 4);
  }
}

void Writer::none() {
  out_ += 'N';
}

void Writer::boolean(bool value) {
  out_ += value ? '\x88' : '\x89';
}

void Writer::integer(int64_t value) {
  if (value >= 0 && value < 256) {
    out_ += 'K';
    little(value, 1);
  } else if (value >= 0 && value < 65536) {
    out_ += 'M';
    little(value, 2);
  } else if (value >= std::numeric_limits<int32_t>::min() &&
             value <= std::numeric_limits<int32_t>::max()) {
    out_ += 'J';
    little(static_cast<uint64_t>(value), 4);
  } else {
    out_ += "\x8a\x08";
    little(static_cast<uint64_t>(value), 8);
  }
}

void Writer::real(double value) {
  out_ += 'G';  // big-endian, unlike everything else here
  const auto bits = std::bit_cast<uint64_t>(value);
  for (int i = 7; i >= 0; --i) out_ += static_cast<char>(bits >> (8 * i) & 0xff);
}

void Writer::string(std::string_view value) {
  std::string key = "s";
  key += value;
  if (known(key)) return;
  out_ += 'X';
  little(value.size(), 4);
  out_ += value;
  remember(key);
}

void Writer::global(const std::string& module, const std::string& name) {
  const std::string key = 'c' + module + '\n' + name;
  if (known(key)) return;
  out_ += key + '\n';
  remember(key);
}

void Writer::empty_tuple() {
  out_ += ')';
}
void Writer::empty_list() {
  out_ += ']';
}
void Writer::empty_dict() {
  out_ += '}';
}
void Writer::mark() {
  out_ += '(';
}
void Writer::tuple() {
  out_ += 't';
}
void Writer::append_all() {
  out_ += 'e';
}
void Writer::set_all() {
  out_ += 'u';
}
void Writer::new_object() {
  out_ += '\x81';
}
void Writer::call() {
  out_ += 'R';
}
void Writer::build() {
  out_ += 'b';
}
void Writer::persistent() {
  out_ += 'Q';
}

std::string Writer::finish() {
  out_ += '.';
  return std::move(out_);
}

}  // namespace fsdp::checkpoint::pickle
