#include "fuzz/token_files.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "data/data_file.h"
#include "fsdp/error.h"

namespace fsdp::fuzz {

std::map<std::string, std::string>& files_in_memory() {
  static std::map<std::string, std::string> files;
  return files;
}

}  // namespace fsdp::fuzz

namespace fsdp::data {

DataFile::DataFile(const std::string& path) : path_(path) {
  const auto found = fuzz::files_in_memory().find(path);
  if (found == fuzz::files_in_memory().end()) throw Error("there is no " + path + ".", "");
  size_ = static_cast<int64_t>(found->second.size());
}

DataFile::~DataFile() = default;

void DataFile::read(int64_t offset, void* into, int64_t bytes) const {
  if (offset < 0 || bytes < 0 || offset > size_ - bytes) std::abort();
  if (bytes == 0) return;
  std::memcpy(into, fuzz::files_in_memory().at(path_).data() + offset, static_cast<size_t>(bytes));
}

std::string DataFile::front(int64_t bytes) const {
  return fuzz::files_in_memory().at(path_).substr(0, static_cast<size_t>(std::min(bytes, size_)));
}

}  // namespace fsdp::data
