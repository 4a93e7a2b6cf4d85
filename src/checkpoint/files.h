// Files and directories for checkpoints: large writes, reads of ranges, and durable writes that
// survive a loss of power. Failures are Errors that name the path.
//
// Durable are a file after Output::close(), and a directory entry after sync_directory() of that
// directory. Nothing else is.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/sums.h"
#include "disk/engine.h"

namespace fsdp::checkpoint::files {

using Path = std::filesystem::path;

// Asks the seam for tests (base/seams.h) whether a call fails: 0, or its errno.
int ask_seam(const char* call, const Path& path);

// A file that is written sequentially. Bytes are collected in blocks. Several blocks are on their
// way to the disk at a time, which a fast disk needs, while other threads compute their checksums.
// Large files bypass the page cache where the file system allows it.
class Output {
 public:
  // Reserves `expected` bytes, so that a full disk fails before the work starts.
  explicit Output(Path path, int64_t expected = 0);
  ~Output();  // without close() the file is incomplete
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  const Path& path() const { return path_; }
  int64_t position() const { return position_; }
  void append(const void* data, size_t size);
  void append(std::string_view text) { append(text.data(), text.size()); }
  void align(int64_t boundary);  // appends zeros up to the next multiple
  FileSums close();              // makes the file durable; returns the sums of its blocks

 private:
  struct Block {
    disk::Memory memory;
    disk::Ticket writing = nullptr;  // null: not since it was last filled
    std::future<std::vector<uint64_t>> sums = {};
  };

  void open(bool direct);
  void reserve(int64_t bytes);
  Block& block();  // the one that is filled
  void write_block();
  void finish(Block& block);  // waits for its writing and its sums

  Path path_;
  disk::OpenFile file_;
  int64_t position_ = 0;
  int64_t written_ = 0;  // bytes whose writing has started
  std::vector<Block> blocks_;
  size_t current_ = 0;  // of blocks_
  std::vector<uint64_t> sums_;            // of finished blocks
  std::unique_ptr<disk::Engine> engine_;  // null: no block was full yet. Last: it uses the others
};

// A file that is read in ranges, by any number of threads. With sums, every block that is read from
// is checked; a damaged one is an Error that names the bytes.
class Input {
 public:
  explicit Input(Path path, const FileSums* sums = nullptr);  // sums must outlive it
  ~Input();
  Input(const Input&) = delete;
  Input& operator=(const Input&) = delete;

  const Path& path() const { return path_; }
  int64_t size() const { return size_; }
  // Reads exactly `size` bytes from `offset` on; an Error if the file is shorter.
  void read(int64_t offset, void* into, size_t size) const;

 private:
  void read_unchecked(int64_t offset, char* into, int64_t size) const;
  // Reads a part of one block. Unless the block was checked before, reads all of it for its sum.
  void read_in_block(int64_t offset, char* into, int64_t size) const;
  void check(int64_t block, const char* bytes, int64_t size) const;

  Path path_;
  int file_ = -1;
  int64_t size_ = 0;
  const FileSums* sums_ = nullptr;
  mutable std::vector<std::atomic<bool>> checked_;  // by block
};

std::string read_whole(const Path& path, int64_t at_most);
std::string read_all(const Path& path, const FileSums* sums);  // checked, unless null
FileSums write_whole(const Path& path, std::string_view bytes);  // durable

void make_directories(const Path& path);  // with parents, durable; an existing one is fine
void make_directory(const Path& path);    // without parents, not durable; likewise
void sync_directory(const Path& path);
void rename(const Path& from, const Path& to);  // replaces a file or link at `to`
bool rename_if_there(const Path& from, const Path& to);  // false: there is no `from`
// Atomically swaps the two. False if the file system doesn't support it.
bool exchange(const Path& one, const Path& other);
void remove_file(const Path& path);       // a missing one is fine
void remove_directory(const Path& path);  // must be empty; a missing one is fine
void make_link(const Path& target, const Path& link);

}  // namespace fsdp::checkpoint::files
