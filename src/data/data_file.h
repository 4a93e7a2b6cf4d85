// DataFile: a file that is read in ranges while it is trained on or tokenized. A part that can't be
// read, because the file was cut or its disk fails, is an Error; a memory map would kill the process
// (SIGBUS).
#pragma once

#include <cstdint>
#include <string>

namespace fsdp::data {

class DataFile {
 public:
  explicit DataFile(const std::string& path);  // throws Error
  // A file that had `size` bytes when it was found: it counts as cut if it has fewer now.
  DataFile(const std::string& path, int64_t size);
  ~DataFile();
  DataFile(const DataFile&) = delete;
  DataFile& operator=(const DataFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  // when it was opened or found
  // Reads exactly `bytes` from `offset` on. Thread-safe.
  void read(int64_t offset, void* into, int64_t bytes) const;
  std::string front(int64_t bytes) const;  // the first bytes, or all if there are fewer

 private:
  std::string path_;
  int handle_ = -1;  // -1: opened for each read, because there are so many files
  int64_t size_ = 0;
};

}  // namespace fsdp::data
