// Zip archives as torch.save makes them: uncompressed records, each starting at a multiple of 64
// bytes of the archive. An archive is a stretch of a larger file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files.h"

namespace fsdp::checkpoint {

inline constexpr int64_t kRecordAlignment = 64;

// Appends an archive to a file. A record's bytes may come in pieces: its sum is written after it.
class ArchiveWriter {
 public:
  explicit ArchiveWriter(files::Output& out) : out_(out), start_(out.position()) {}

  void add(const std::string& name, std::string_view bytes);
  void begin(const std::string& name, int64_t size);
  void data(const void* bytes, size_t size);
  void end();
  uint32_t last_sum() const { return records_.back().sum; }  // of the last finished record
  int64_t finish();                                          // returns the archive's length

 private:
  struct WrittenRecord {
    std::string name;
    int64_t offset;  // of its header
    int64_t size;
    uint32_t sum;
  };
  int64_t position() const { return out_.position() - start_; }
  void write_directory();

  files::Output& out_;
  int64_t start_;
  std::vector<WrittenRecord> records_;
};

// Finds records. Reads only the ends of the archive and what is asked for.
class ArchiveReader {
 public:
  struct Record {
    std::string name;  // without the archive's own name
    int64_t offset;    // of its bytes in the file
    int64_t size;
    uint32_t sum;  // expected CRC-32 of its bytes
  };

  // `where` names the archive in errors.
  ArchiveReader(const files::Input& file, int64_t offset, int64_t length, std::string where);

  std::optional<Record> find(const std::string& name) const;
  Record need(const std::string& name) const;  // an Error if there is none
  std::vector<Record> records() const;         // all of them
  std::string read(const Record& record, int64_t at_most) const;

 private:
  struct DirectoryEntry {
    std::string name;
    int64_t header;  // in the archive
    int64_t size;
    uint32_t sum;
    bool stored;
  };
  Record locate(const DirectoryEntry& entry) const;  // by its header
  [[noreturn]] void fail(const std::string& what) const;
  std::string bytes(int64_t offset, int64_t size) const;  // of the archive
  void read_directory();

  const files::Input& file_;
  int64_t offset_, length_;
  std::string where_;
  std::string head_, tail_;
  std::vector<DirectoryEntry> entries_;
};

// "000042" for 42 with width 6, as torch.save writes the identity of an archive.
std::string zero_padded(uint64_t number, size_t width);

}  // namespace fsdp::checkpoint
