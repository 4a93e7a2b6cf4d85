#include "data/mapped_file.h"

#include <sys/mman.h>

#include <cerrno>

#include "base/file_error.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "fsdp/error.h"

namespace fsdp::data {

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const RegularFile file(path);
  size_ = static_cast<size_t>(file.or_throw().size());
  if (size_ == 0) return;
  data_ = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.descriptor(), 0);
  if (data_ != MAP_FAILED) return;
  data_ = nullptr;
  const int why = errno;
  throw Error(formatted("can't read {}: {}.", path, errno_text(why)), file_hint(why));
}

MappedFile::~MappedFile() {
  if (data_) munmap(data_, size_);
}

}  // namespace fsdp::data
