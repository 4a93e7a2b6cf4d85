#include "observe/tensorboard.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <filesystem>

#include "base/file_error.h"
#include "base/format.h"
#include "base/process.h"
#include "fsdp/error.h"

namespace fsdp::observe {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "events.out.tfevents.";

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0x82F63B78u : 0);
    table[byte] = value;
  }
  return table;
}

// --- protocol buffers: each field is a number and a kind, then the value ---

enum WireType : uint32_t { VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 };

void add_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>((value & 0x7F) | 0x80);
  out += static_cast<char>(value);
}

void add_key(std::string& out, uint32_t field, WireType kind) {
  add_varint(out, field << 3 | kind);
}

// Little-endian on any machine.
template <typename Bits>
void add_fixed(std::string& out, Bits bits) {
  for (size_t i = 0; i < sizeof bits; ++i) out += static_cast<char>(bits >> 8 * i & 0xFF);
}

void add_integer(std::string& out, uint32_t field, int64_t value) {
  add_key(out, field, VARINT);
  add_varint(out, static_cast<uint64_t>(value));
}

void add_bytes(std::string& out, uint32_t field, std::string_view bytes) {
  add_key(out, field, BYTES);
  add_varint(out, bytes.size());
  out += bytes;
}

void add_float(std::string& out, uint32_t field, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  add_key(out, field, FIXED32);
  add_fixed(out, bits);
}

// Event: 1 wall_time, 2 step, 3 file_version, 5 summary, 7 session_log
std::string event(double wall_time, int64_t step) {
  std::string out;
  uint64_t bits;
  std::memcpy(&bits, &wall_time, sizeof bits);
  add_key(out, 1, FIXED64);
  add_fixed(out, bits);
  if (step != 0) add_integer(out, 2, step);
  return out;
}

double now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// TensorBoard reads the files of a folder in the order of their names, so a new file must have a
// later time than all existing ones, even if two runs start within a second.
int64_t time_for_name(const std::string& dir) {
  int64_t time = static_cast<int64_t>(now());
  for (const auto& entry : fs::directory_iterator(dir)) {
    std::string name = entry.path().filename().string();
    if (!name.starts_with(kPrefix)) continue;
    const char* digits = name.data() + std::strlen(kPrefix);
    int64_t other = 0;
    std::from_chars(digits, name.data() + name.size(), other);
    if (other < 100'000'000'000) time = std::max(time, other + 1);
  }
  return time;
}

}  // namespace

uint32_t crc32c(std::string_view data) {
  static constexpr auto kTable = crc_table();
  uint32_t value = 0xFFFFFFFFu;
  for (char c : data) value = value >> 8 ^ kTable[(value ^ static_cast<unsigned char>(c)) & 0xFF];
  return ~value;
}

uint32_t masked_crc32c(std::string_view data) {
  uint32_t value = crc32c(data);
  return (value >> 15 | value << 17) + 0xA282EAD8u;
}

EventWriter::EventWriter(const std::string& dir, std::optional<int64_t> resume_step) {
  std::error_code problem;
  fs::create_directories(dir, problem);
  if (problem) {
    throw Error(formatted("can't create the folder {}: {}.", dir, problem.message()),
                file_hint(problem.value()));
  }
  file_ = (fs::path(dir) /
           formatted("{}{}.{}.{}", kPrefix, time_for_name(dir), host_name(), ::getpid()))
              .string();
  handle_ = ::open(file_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
  if (handle_ < 0) {
    const int why = errno;
    throw Error(formatted("can't write {}: {}.", file_, errno_text(why)),
                file_hint(why) + " log.tensorboard = false does without.");
  }
  std::string first = event(now(), 0);
  add_bytes(first, 3, "brain.Event:2");
  add(first);
  if (resume_step) {
    // SessionLog: 1 status, START = 1. Readers drop this step and later ones from earlier files.
    std::string log, start = event(now(), *resume_step + 1);
    add_integer(log, 1, 1);
    add_bytes(start, 7, log);
    add(start);
  }
  flush();
}

EventWriter::~EventWriter() {
  try {
    flush();
  } catch (const Error&) {  // callers that care call flush()
  }
  ::close(handle_);
}

// Summary: 1 value; Value: 1 tag, 2 simple_value, 8 tensor, 9 metadata
void EventWriter::scalar(std::string_view tag, double value, int64_t step) {
  std::string item, summary, record = event(now(), step);
  add_bytes(item, 1, tag);
  add_float(item, 2, static_cast<float>(value));
  add_bytes(summary, 1, item);
  add_bytes(record, 5, summary);
  add(record);
}

// TensorProto: 1 dtype (7: string), 2 shape, 8 string_val; TensorShapeProto: 2 dim, whose 1 is size
// SummaryMetadata: 1 plugin_data, whose 1 is plugin_name
void EventWriter::text(std::string_view tag, std::string_view text, int64_t step) {
  std::string plugin, metadata, dim, shape, tensor, item, summary, record = event(now(), step);
  add_bytes(plugin, 1, "text");
  add_bytes(metadata, 1, plugin);
  add_integer(dim, 1, 1);
  add_bytes(shape, 2, dim);
  add_integer(tensor, 1, 7);
  add_bytes(tensor, 2, shape);
  add_bytes(tensor, 8, text);
  add_bytes(item, 1, tag);
  add_bytes(item, 8, tensor);
  add_bytes(item, 9, metadata);
  add_bytes(summary, 1, item);
  add_bytes(record, 5, summary);
  add(record);
}

void EventWriter::add(std::string_view event) {
  std::string length;
  add_fixed(length, static_cast<uint64_t>(event.size()));
  pending_ += length;
  add_fixed(pending_, masked_crc32c(length));
  pending_ += event;
  add_fixed(pending_, masked_crc32c(event));
  constexpr size_t kEnough = 1 << 20;
  if (pending_.size() > kEnough) flush();
}

void EventWriter::flush() {
  size_t done = 0;
  while (done < pending_.size()) {
    ssize_t wrote = ::write(handle_, pending_.data() + done, pending_.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) {
      int why = errno;
      pending_.erase(0, done);  // these bytes are in the file already
      throw Error(formatted("can't write {}: {}.", file_, errno_text(why)), file_hint(why));
    }
    done += static_cast<size_t>(wrote);
  }
  pending_.clear();
}

}  // namespace fsdp::observe
