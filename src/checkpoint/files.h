// Files and directories as checkpoints need them: large writes, reads of ranges, and everything
// that makes what was written survive a loss of power. Failures are Errors that name the path.
//
// What is durable: a file after Output::close(), an entry of a directory after sync_directory() of
// that directory. Nothing else is.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/sums.h"

namespace fsdp::checkpoint::files {

using Path = std::filesystem::path;

// A seam for tests: called before every system call that changes something on the disk, and before
// a copy is made in host memory ("copy"). What it returns is the errno that the call fails with; 0
// lets it happen. Null: none.
using Seam = int (*)(const char* call, const Path& path);
void set_seam(Seam seam);
int ask_seam(const char* call, const Path& path);

// A file that is written from its beginning to its end. Small pieces are collected, large ones are
// written from where they lie. The disk begins with them at once, so that little is left to wait
// for in close().
class Output {
 public:
  // `expected` bytes are reserved on the disk, so that a full one is noticed before the work.
  explicit Output(Path path, int64_t expected = 0);
  ~Output();  // without close() the file is not complete
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  const Path& path() const { return path_; }
  int64_t position() const { return position_; }
  void append(const void* data, size_t size);
  void append(std::string_view text) { append(text.data(), text.size()); }
  void align(int64_t boundary);  // zeros up to the next multiple
  FileSums close();              // on the disk when it returns; what was written, block by block

 private:
  void write(const char* data, size_t size);
  void flush();

  Path path_;
  int file_ = -1;
  bool reserved_ = false;
  int64_t position_ = 0;
  int64_t written_ = 0;  // handed to the kernel
  int64_t started_ = 0;  // and on their way to the disk
  std::vector<char> pending_;
  Summing summing_;
};

// A file that is read by ranges, by any number of threads. With sums every block that is read from
// is checked; one that is damaged is an Error that names the bytes.
class Input {
 public:
  explicit Input(Path path, const FileSums* sums = nullptr);  // sums must outlive it
  ~Input();
  Input(const Input&) = delete;
  Input& operator=(const Input&) = delete;

  const Path& path() const { return path_; }
  int64_t size() const { return size_; }
  // Exactly `size` bytes from `offset` on; an Error if the file is shorter.
  void read(int64_t offset, void* into, size_t size) const;

 private:
  void read_unchecked(int64_t offset, char* into, int64_t size) const;
  // A part of one block; the rest of it is read for its sum, unless it was checked before.
  void read_in_block(int64_t offset, char* into, int64_t size) const;
  void check(int64_t block, const char* bytes, int64_t size) const;

  Path path_;
  int file_ = -1;
  int64_t size_ = 0;
  const FileSums* sums_ = nullptr;
  mutable std::vector<std::atomic<bool>> checked_;  // by block
};

std::string read_whole(const Path& path, int64_t at_most);
FileSums write_whole(const Path& path, std::string_view bytes);  // on the disk when it returns

void make_directories(const Path& path);  // with parents, on the disk; one that exists is fine
void make_directory(const Path& path);    // alone, and not on the disk yet; likewise
void sync_directory(const Path& path);
void rename(const Path& from, const Path& to);  // a file or link at `to` is replaced
// The two change places in one step. False where the file system cannot do that.
bool exchange(const Path& one, const Path& other);
void remove_file(const Path& path);       // one that is not there is fine
void remove_directory(const Path& path);  // an empty one; likewise
void make_link(const Path& target, const Path& link);

}  // namespace fsdp::checkpoint::files
