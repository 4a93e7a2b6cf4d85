#include "data/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::data {

MappedFile::MappedFile(const std::string& path) : path_(path) {
  int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat status {};
  bool good = file >= 0 && fstat(file, &status) == 0;
  if (good && !S_ISREG(status.st_mode)) {
    close(file);
    throw Error(formatted("{} isn't a regular file.", path),
                "pass files, or folders that contain files.");
  }
  if (good && status.st_size > 0) {
    size_ = static_cast<size_t>(status.st_size);
    data_ = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
    if (data_ == MAP_FAILED) good = false, data_ = nullptr;
  }
  int reason = errno;
  if (file >= 0) close(file);
  if (!good) {
    throw Error(formatted("can't read {}: {}.", path, std::strerror(reason)),
                "check the path and its permissions.");
  }
}

MappedFile::~MappedFile() {
  if (data_) munmap(data_, size_);
}

}  // namespace fsdp::data
