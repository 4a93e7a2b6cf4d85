#include "checkpoint/zip.h"

#include <libdeflate.h>

#include <algorithm>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

constexpr uint32_t kLocal = 0x04034b50, kCentral = 0x02014b50, kDescriptor = 0x08074b50;
constexpr uint32_t kEnd = 0x06054b50, kEnd64 = 0x06064b50, kLocator64 = 0x07064b50;
constexpr int64_t kLocalSize = 30, kCentralSize = 46, kEndSize = 22, kEnd64Size = 56,
                  kLocator64Size = 20;
constexpr int64_t kNoFit = 0xffffffff;  // marks a number that is in the zip64 fields
constexpr uint16_t kFlags = 0x0808;     // sums and sizes follow the data; names are UTF-8
constexpr int64_t kWindow = 4096;       // bytes read at each end of the archive
constexpr int64_t kLargestDirectory = 16 << 20;
constexpr size_t kSummed = 256 << 10;  // bytes summed and written while they are in the cache

struct Fields {  // a sequence of little-endian numbers
  std::string text;
  Fields& add(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i) & 0xff);
    return *this;
  }
};

uint64_t number(std::string_view text, int64_t at, int bytes) {
  uint64_t value = 0;
  for (int i = bytes - 1; i >= 0; --i)
    value = value << 8 | static_cast<unsigned char>(text[static_cast<size_t>(at + i)]);
  return value;
}

}  // namespace

// --- writing ---

void ArchiveWriter::add(const std::string& name, std::string_view bytes) {
  begin(name, static_cast<int64_t>(bytes.size()));
  data(bytes.data(), bytes.size());
  end();
}

void ArchiveWriter::begin(const std::string& name, int64_t size) {
  records_.push_back({"archive/" + name, position(), size, 0});
  const std::string& full = records_.back().name;
  Fields extra;
  if (size >= kNoFit) extra.add(1, 2).add(16, 2).add(size, 8).add(size, 8);
  // A padding field aligns the data, as in torch.
  int64_t data =
      position() + kLocalSize + static_cast<int64_t>(full.size() + extra.text.size()) + 4;
  const int64_t padding = (kRecordAlignment - data % kRecordAlignment) % kRecordAlignment;
  extra.add(0x4246, 2).add(padding, 2).text.append(static_cast<size_t>(padding), 'Z');
  Fields header;
  header.add(kLocal, 4).add(0, 2).add(kFlags, 2).add(0, 2).add(0, 4).add(0, 4);
  header.add(size >= kNoFit ? kNoFit : 0, 4).add(size >= kNoFit ? kNoFit : 0, 4);
  header.add(full.size(), 2).add(extra.text.size(), 2);
  out_.append(header.text + full + extra.text);
}

void ArchiveWriter::data(const void* bytes, size_t size) {
  // Sums each piece just before it is written, so that most of it is in the cache.
  const auto* at = static_cast<const char*>(bytes);
  for (size_t done = 0; done < size;) {
    const size_t part = size - done < 2 * kSummed ? size - done : kSummed;
    records_.back().sum = libdeflate_crc32(records_.back().sum, at + done, part);
    out_.append(at + done, part);
    done += part;
  }
}

void ArchiveWriter::end() {
  const WrittenRecord& record = records_.back();
  const int width = record.size >= kNoFit ? 8 : 4;
  Fields descriptor;
  descriptor.add(kDescriptor, 4).add(record.sum, 4);
  out_.append(descriptor.add(record.size, width).add(record.size, width).text);
}

int64_t ArchiveWriter::finish() {
  write_directory();
  return position();
}

void ArchiveWriter::write_directory() {
  const int64_t begin = position();
  for (const auto& record : records_) {
    const bool large = record.size >= kNoFit, far = record.offset >= kNoFit;
    Fields extra;
    if (large || far) extra.add(1, 2).add((large ? 16 : 0) + (far ? 8 : 0), 2);
    if (large) extra.add(record.size, 8).add(record.size, 8);
    if (far) extra.add(record.offset, 8);
    Fields header;
    header.add(kCentral, 4).add(0, 2).add(0, 2).add(kFlags, 2).add(0, 2).add(0, 4);
    header.add(record.sum, 4);
    header.add(std::min(record.size, kNoFit), 4).add(std::min(record.size, kNoFit), 4);
    header.add(record.name.size(), 2).add(extra.text.size(), 2).add(0, 2).add(0, 2).add(0, 2);
    header.add(0, 4).add(std::min(record.offset, kNoFit), 4);
    out_.append(header.text + record.name + extra.text);
  }
  const int64_t end = position();
  Fields last;
  last.add(kEnd64, 4).add(kEnd64Size - 12, 8).add(0x031e, 2).add(45, 2).add(0, 4).add(0, 4);
  last.add(records_.size(), 8).add(records_.size(), 8).add(end - begin, 8).add(begin, 8);
  last.add(kLocator64, 4).add(0, 4).add(end, 8).add(1, 4);
  last.add(kEnd, 4).add(0, 2).add(0, 2).add(records_.size(), 2).add(records_.size(), 2);
  last.add(end - begin, 4).add(std::min(begin, kNoFit), 4).add(0, 2);
  out_.append(last.text);
}

// --- reading ---

ArchiveReader::ArchiveReader(const files::Input& file, int64_t offset, int64_t length,
                             std::string where)
    : file_(file), offset_(offset), length_(length), where_(std::move(where)) {
  if (offset_ < 0 || length_ < kEndSize || offset_ > file_.size() - length_)
    throw Error(formatted("{}: has {} bytes, but {} should be the {} bytes from byte {} on.",
                          file_.path(), file_.size(), where_, length_, offset_),
                "the file is damaged or was copied incompletely; load another checkpoint.");
  const int64_t window = std::min(length_, kWindow);
  head_.resize(static_cast<size_t>(window));
  file_.read(offset_, head_.data(), head_.size());
  tail_ = head_;
  if (length_ > kWindow) file_.read(offset_ + length_ - window, tail_.data(), tail_.size());
  read_directory();
}

void ArchiveReader::fail(const std::string& what) const {
  throw Error(formatted("{}: {} {}.", file_.path(), where_, what),
              "the file is damaged, or torch.save didn't write it; load another checkpoint.");
}

std::string ArchiveReader::bytes(int64_t offset, int64_t size) const {
  if (offset < 0 || size < 0 || size > length_ || offset > length_ - size)
    fail("points beyond its own end");
  const auto window = static_cast<int64_t>(head_.size());
  if (offset + size <= window)
    return head_.substr(static_cast<size_t>(offset), static_cast<size_t>(size));
  if (offset >= length_ - window)
    return tail_.substr(static_cast<size_t>(offset - (length_ - window)),
                        static_cast<size_t>(size));
  std::string read(static_cast<size_t>(size), '\0');
  file_.read(offset_ + offset, read.data(), read.size());
  return read;
}

void ArchiveReader::read_directory() {
  const auto end = bytes(length_ - kEndSize, kEndSize);
  if (number(end, 0, 4) != kEnd) fail("doesn't end like a zip archive");
  auto count = static_cast<int64_t>(number(end, 10, 2));
  auto size = static_cast<int64_t>(number(end, 12, 4));
  auto begin = static_cast<int64_t>(number(end, 16, 4));
  if (length_ >= kEndSize + kLocator64Size) {
    const auto locator = bytes(length_ - kEndSize - kLocator64Size, kLocator64Size);
    if (number(locator, 0, 4) == kLocator64) {
      const auto end64 = bytes(static_cast<int64_t>(number(locator, 8, 8)), kEnd64Size);
      if (number(end64, 0, 4) != kEnd64) fail("doesn't end like a zip archive");
      count = static_cast<int64_t>(number(end64, 32, 8));
      size = static_cast<int64_t>(number(end64, 40, 8));
      begin = static_cast<int64_t>(number(end64, 48, 8));
    }
  }
  if (size < 0 || size > kLargestDirectory || count < 0 || count > size / kCentralSize)
    fail("has an impossible directory");
  const std::string directory = bytes(begin, size);
  int64_t at = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (size - at < kCentralSize || number(directory, at, 4) != kCentral)
      fail("has a damaged directory");
    const auto names = static_cast<int64_t>(number(directory, at + 28, 2));
    const auto extras = static_cast<int64_t>(number(directory, at + 30, 2));
    const auto comments = static_cast<int64_t>(number(directory, at + 32, 2));
    const int64_t next = at + kCentralSize + names + extras + comments;
    if (next > size) fail("has a damaged directory");
    DirectoryEntry entry;
    entry.stored = number(directory, at + 10, 2) == 0;
    entry.sum = static_cast<uint32_t>(number(directory, at + 16, 4));
    entry.size = static_cast<int64_t>(number(directory, at + 24, 4));
    entry.header = static_cast<int64_t>(number(directory, at + 42, 4));
    entry.name =
        directory.substr(static_cast<size_t>(at + kCentralSize), static_cast<size_t>(names));
    // The zip64 field holds only those numbers that don't fit, in this order.
    const bool packed_too = static_cast<int64_t>(number(directory, at + 20, 4)) == kNoFit;
    for (int64_t field = at + kCentralSize + names; field + 4 <= next - comments;) {
      const auto length = static_cast<int64_t>(number(directory, field + 2, 2));
      if (field + 4 + length > next - comments) fail("has a damaged directory");
      int64_t value = field + 4;
      const auto take = [&](int64_t& into) {
        if (value + 8 > field + 4 + length) fail("has a damaged directory");
        into = static_cast<int64_t>(number(directory, value, 8));
        value += 8;
      };
      int64_t packed = 0;
      if (number(directory, field, 2) == 1) {
        if (entry.size == kNoFit) take(entry.size);
        if (packed_too) take(packed);
        if (entry.header == kNoFit) take(entry.header);
      }
      field += 4 + length;
    }
    entries_.push_back(std::move(entry));
    at = next;
  }
}

ArchiveReader::Record ArchiveReader::locate(const DirectoryEntry& entry) const {
  const std::string name = entry.name.substr(entry.name.find('/') + 1);
  if (!entry.stored) fail(formatted("has a compressed record \"{}\"", name));
  const auto header = bytes(entry.header, kLocalSize);
  if (number(header, 0, 4) != kLocal) fail(formatted("has a damaged record \"{}\"", name));
  const int64_t begin = entry.header + kLocalSize + static_cast<int64_t>(number(header, 26, 2)) +
                        static_cast<int64_t>(number(header, 28, 2));
  if (entry.size < 0 || entry.size > length_ || begin > length_ - entry.size)
    fail("points beyond its own end");
  return Record{name, offset_ + begin, entry.size, entry.sum};
}

std::optional<ArchiveReader::Record> ArchiveReader::find(const std::string& name) const {
  for (const auto& entry : entries_) {
    const size_t slash = entry.name.find('/');
    if (slash != std::string::npos && entry.name.substr(slash + 1) == name) return locate(entry);
  }
  return std::nullopt;
}

std::vector<ArchiveReader::Record> ArchiveReader::records() const {
  std::vector<Record> all;
  for (const auto& entry : entries_) all.push_back(locate(entry));
  return all;
}

ArchiveReader::Record ArchiveReader::need(const std::string& name) const {
  auto found = find(name);
  if (!found) fail(formatted("has no record \"{}\"", name));
  return *found;
}

std::string ArchiveReader::read(const Record& record, int64_t at_most) const {
  if (record.size > at_most) fail(formatted("has a record \"{}\" that is too large", record.name));
  return bytes(record.offset - offset_, record.size);
}

std::string zero_padded(uint64_t number, size_t width) {
  return formatted("{:0{}}", number, width);
}

}  // namespace fsdp::checkpoint
