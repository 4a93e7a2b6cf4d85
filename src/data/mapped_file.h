// MappedFile: a read-only memory map of a text that is tokenized. The file must not shrink while it
// is mapped: reading a part that is gone kills the process (SIGBUS). What is trained on is a
// DataFile.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fsdp::data {

class MappedFile {
 public:
  explicit MappedFile(const std::string& path);  // throws Error
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  std::string_view bytes() const { return {static_cast<const char*>(data_), size_}; }
  int64_t size() const { return static_cast<int64_t>(size_); }

 private:
  std::string path_;
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace fsdp::data
