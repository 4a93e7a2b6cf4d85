#include "fuzz/token_files.h"

#include <cstring>

#include "data/mapped_file.h"
#include "fsdp/error.h"

namespace fsdp::fuzz {

std::map<std::string, std::string>& mapped_files() {
  static std::map<std::string, std::string> files;
  return files;
}

}  // namespace fsdp::fuzz

namespace fsdp::data {

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const auto found = fuzz::mapped_files().find(path);
  if (found == fuzz::mapped_files().end()) throw Error("there is no " + path + ".", "");
  size_ = found->second.size();
  if (size_ == 0) return;
  data_ = new char[size_];
  std::memcpy(data_, found->second.data(), size_);
}

MappedFile::~MappedFile() {
  delete[] static_cast<char*>(data_);
}

}  // namespace fsdp::data
