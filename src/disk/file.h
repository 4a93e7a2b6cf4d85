// ScratchFile: a file of this process alone, of fixed size, that is gone when the process is.
//
// Its name is removed as soon as it is open, so that a kill leaves nothing behind. All its blocks
// are allocated at once: a disk that is too small is found here and not in the middle of a step.
// It is opened past the page cache (O_DIRECT) where the file system allows; then offsets, sizes and
// addresses must be multiples of kAlignment.
#pragma once

#include <cstdint>
#include <string>

namespace fsdp::disk {

constexpr int64_t kAlignment = 4096;

constexpr int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

class ScratchFile {
 public:
  // `direct`: false to go through the page cache even where O_DIRECT works.
  ScratchFile(const std::string& directory, int64_t bytes, bool direct = true);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  int descriptor() const { return descriptor_; }
  int64_t bytes() const { return bytes_; }
  bool direct() const { return direct_; }
  const std::string& path() const { return path_; }  // that it had; for messages

 private:
  void open(bool direct);
  void reserve() const;

  std::string directory_;
  std::string path_;
  int descriptor_ = -1;
  int64_t bytes_ = 0;
  bool direct_ = false;
};

// A seam for tests: asked before a file is allocated ("allocate") and after each piece that was
// read or written ("read", "write"). Returns 0, or the errno to fail with. It may block. Called by
// threads of ours.
using Seam = int (*)(const char* call, int64_t offset);
void set_seam(Seam seam);  // nullptr: none
int ask_seam(const char* call, int64_t offset);

}  // namespace fsdp::disk
