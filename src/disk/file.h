// ScratchFile: a private file of fixed size that disappears with the process.
//
// It is unlinked as soon as it is open, so a killed process leaves nothing behind. All its blocks
// are allocated up front: a disk that is too small fails here and not in the middle of a step. It
// bypasses the page cache (O_DIRECT) where the file system allows; offsets, sizes and addresses
// must then be multiples of kAlignment.
#pragma once

#include <cstdint>
#include <string>

namespace fsdp::disk {

constexpr int64_t kAlignment = 4096;

constexpr int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// A file that an engine reads and writes. Whoever opened it closes it.
struct OpenFile {
  int descriptor = -1;
  bool direct = false;  // bypasses the page cache
  std::string path;     // for messages
};

class ScratchFile {
 public:
  // `direct` = false uses the page cache even where O_DIRECT works.
  ScratchFile(const std::string& directory, int64_t bytes, bool direct = true);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  operator OpenFile() const { return {descriptor_, direct_, path_}; }
  int descriptor() const { return descriptor_; }
  int64_t bytes() const { return bytes_; }
  bool direct() const { return direct_; }
  const std::string& path() const { return path_; }  // the unlinked path, for messages

 private:
  void open(bool direct);
  void reserve() const;

  std::string directory_;
  std::string path_;
  int descriptor_ = -1;
  int64_t bytes_ = 0;
  bool direct_ = false;
};

// Asks the seam for tests (base/seams.h) whether a call fails: 0, or its errno.
int ask_seam(const char* call, int64_t offset);

}  // namespace fsdp::disk
