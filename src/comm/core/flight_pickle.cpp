#include "comm/core/flight_pickle.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace fsdp::comm::flight {
namespace {

constexpr const char* kKeyNames[kKeys] = {
    "record_id",
    "pg_id",
    "process_group",
    "collective_seq_id",
    "p2p_seq_id",
    "op_id",
    "profiling_name",
    "time_created_ns",
    "input_sizes",
    "input_dtypes",
    "output_sizes",
    "output_dtypes",
    "state",
    "time_discovered_started_ns",
    "time_discovered_completed_ns",
    "retired",
    "timeout_ms",
    "is_p2p",
    "thread_id",
    "frames",
    "name",
    "filename",
    "line",
    "operation",
    "reduce",
    "root",
    "path",
    "identity",
    "count",
    "label",
    "device",
    "stream",
    "step",
    "failed",
};

// Bytes of the UTF-8 character at the beginning of `text`; 0: it isn't one.
size_t character(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  const size_t size = lead < 0x80                   ? 1
                      : lead >= 0xc2 && lead < 0xe0 ? 2
                      : lead >= 0xe0 && lead < 0xf0 ? 3
                      : lead >= 0xf0 && lead < 0xf5 ? 4
                                                    : 0;
  if (size == 0 || size > text.size()) return 0;
  for (size_t i = 1; i < size; ++i)
    if ((static_cast<unsigned char>(text[i]) & 0xc0) != 0x80) return 0;
  const auto next = size > 1 ? static_cast<unsigned char>(text[1]) : 0;
  const bool overlong = (lead == 0xe0 && next < 0xa0) || (lead == 0xf0 && next < 0x90);
  const bool beyond = (lead == 0xed && next >= 0xa0) || (lead == 0xf4 && next >= 0x90);
  return overlong || beyond ? 0 : size;
}

}  // namespace

PickleFile::PickleFile(int file) : file_(file) {
  byte(0x80);  // PROTO
  byte(2);
}

void PickleFile::integer(int64_t value) {
  if (value >= INT32_MIN && value <= INT32_MAX) {
    op('J');
    return little(static_cast<uint64_t>(value), 4);
  }
  op(static_cast<char>(0x8a));  // LONG1
  byte(8);
  little(static_cast<uint64_t>(value), 8);
}

void PickleFile::text(std::string_view value) {
  const auto each = [&](auto&& visit) {
    for (size_t i = 0; i < value.size();) {
      const size_t bytes = character(value.substr(i));
      visit(bytes ? value.substr(i, bytes) : std::string_view("?"));
      i += std::max<size_t>(bytes, 1);
    }
  };
  size_t size = 0;
  each([&](std::string_view piece) { size += piece.size(); });
  op('X');
  little(size, 4);
  each([&](std::string_view piece) {
    for (char c : piece) byte(static_cast<unsigned char>(c));
  });
}

void PickleFile::key(Key key) {
  if (known_[key]) {
    op('h');
    return byte(key);
  }
  text(kKeyNames[key]);
  op('q');
  byte(key);
  known_[key] = true;
}

bool PickleFile::finish() {
  op('.');
  flush();
  return good_;
}

void PickleFile::byte(unsigned char value) {
  if (used_ == sizeof buffer_) flush();
  buffer_[used_++] = static_cast<char>(value);
}

void PickleFile::little(uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) byte(static_cast<unsigned char>(value >> (8 * i)));
}

void PickleFile::flush() {
  const char* from = buffer_;
  while (good_ && used_ > 0) {
    const ssize_t done = ::write(file_, from, used_);
    if (done < 0 && errno == EINTR) continue;
    good_ = done > 0;
    if (!good_) break;
    from += done;
    used_ -= static_cast<size_t>(done);
  }
  used_ = 0;
}

}  // namespace fsdp::comm::flight
