#include "checkpoint/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "base/file_error.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "base/seams.h"
#include "checkpoint/damaged.h"

#ifndef RENAME_EXCHANGE
#define RENAME_EXCHANGE (1 << 1)
#endif

namespace fsdp::checkpoint::files {
namespace {

constexpr int64_t kBlock = 4 << 20;         // bytes
constexpr int kBlocks = 8;                  // on their way to the disk at a time
constexpr size_t kMostInACall = 256 << 20;  // below the kernel's 2 GiB, so that errors come early

[[noreturn]] void fail(const Path& path, const std::string& what, int code) {
  throw Error(formatted("{}: {}: {}.", path, what, errno_text(code)), file_hint(code));
}

// The bytes aren't there, for whatever reason.
[[noreturn]] void fail_to_read(const Path& path, const std::string& what, int code) {
  if (code != EIO && code != ENOENT) fail(path, what, code);
  throw Damaged(formatted("{}: {}: {}.", path, what, errno_text(code)), file_hint(code));
}

// A system call that changes something on the disk; retried if a signal interrupts it.
template <typename Call>
auto change(const char* name, const Path& path, Call call) {
  decltype(call()) result;
  do {
    errno = ask_seam(name, path);
    result = errno == 0 ? call() : -1;
  } while (result < 0 && errno == EINTR);
  return result;
}

template <typename Call>
void change_or_fail(const char* name, const Path& path, Call call) {
  if (change(name, path, call) < 0) fail(path, formatted("{} failed", name), errno);
}

}  // namespace

int ask_seam(const char* call, const Path& path) {
  const auto& seam = seams().files;
  return seam ? seam(call, path) : 0;
}

// --- Output ---

Output::Output(Path path, int64_t expected) : path_(std::move(path)) {
  ignore_size_signal();
  open(/*direct=*/expected >= kBlock);
  if (expected > 0) reserve(expected);
}

void Output::open(bool direct) {
  const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | (direct ? O_DIRECT : 0);
  place_of_file(path_);
  const int file = change("create", path_, [&] { return ::open(path_.c_str(), flags, 0666); });
  if (file < 0 && errno == EINVAL && direct) return open(false);  // not on this file system
  if (file < 0) fail(path_, "cannot be created", errno);
  file_ = {file, direct, path_};
}

void Output::reserve(int64_t bytes) {
  const auto call = [&] { return ::fallocate(file_.descriptor, 0, 0, bytes); };
  // Many file systems don't support this; only a file that can't become so large is an error.
  if (change("reserve", path_, call) == 0) return;
  if (errno != ENOSPC && errno != EDQUOT && errno != EFBIG) return;
  const int code = errno;
  ::close(std::exchange(file_.descriptor, -1));
  fail(path_, formatted("no room for {} bytes", bytes), code);
}

Output::~Output() {
  engine_.reset();
  if (file_.descriptor >= 0) ::close(file_.descriptor);
}

Output::Block& Output::block() {
  if (current_ == blocks_.size()) {
    disk::Memory memory = disk::huge_pages(kBlock);
    if (!memory && blocks_.empty()) throw std::bad_alloc();
    if (memory)
      blocks_.push_back({std::move(memory)});
    else
      current_ = 0;  // make do with those that there are
  }
  Block& block = blocks_[current_];
  finish(block);
  return block;
}

void Output::finish(Block& block) {
  if (!block.writing) return;
  engine_->wait(std::exchange(block.writing, nullptr));
  const std::vector<uint64_t> sums = block.sums.get();  // Ends: it computes
  sums_.insert(sums_.end(), sums.begin(), sums.end());
}

void Output::append(const void* data, size_t size) {
  const auto* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const int64_t filled = position_ - written_;
    const size_t part = std::min(size, static_cast<size_t>(kBlock - filled));
    std::memcpy(block().memory.get() + filled, bytes, part);
    bytes += part;
    size -= part;
    position_ += static_cast<int64_t>(part);
    if (position_ - written_ == kBlock) write_block();
  }
}

void Output::align(int64_t boundary) {
  const auto missing = static_cast<size_t>((boundary - position_ % boundary) % boundary);
  append(std::string(missing, '\0'));
}

void Output::write_block() {
  if (position_ == written_) return;
  if (const int code = ask_seam("write", path_)) fail(path_, "writing failed", code);
  if (!engine_)
    engine_ = disk::make_engine(file_, {.piece = kBlock, .depth = kBlocks, .threads = kBlocks}, {});
  Block& full = block();
  const int64_t bytes = position_ - written_, whole = disk::aligned(bytes);
  if (file_.direct) std::memset(full.memory.get() + bytes, 0, static_cast<size_t>(whole - bytes));
  full.writing = engine_->start(disk::Direction::kWrite, written_, full.memory.get(),
                                file_.direct ? whole : bytes);
  const auto sum = [from = full.memory.get(), bytes] {
    return block_sums(from, static_cast<size_t>(bytes));
  };
  full.sums = std::async(
      bytes < kBlock ? std::launch::deferred : std::launch::async | std::launch::deferred, sum);
  written_ = position_;
  current_ = current_ + 1 < size_t{kBlocks} ? current_ + 1 : 0;
}

FileSums Output::close() {
  write_block();
  for (size_t i = 0; i < blocks_.size(); ++i) finish(blocks_[(current_ + i) % blocks_.size()]);
  engine_.reset();
  const int file = file_.descriptor;
  // Cuts off what was reserved or written to fill the last block.
  change_or_fail("truncate", path_, [&] { return ::ftruncate(file, position_); });
  change_or_fail("fsync", path_, [&] { return ::fsync(file); });
  if (::close(std::exchange(file_.descriptor, -1)) < 0) fail(path_, "closing failed", errno);
  return {position_, std::move(sums_)};
}

// --- Input ---

Input::Input(Path path, const FileSums* sums) : path_(std::move(path)), sums_(sums) {
  RegularFile file(path_);
  if (!file.is_open() && file.code() == 0)
    throw Error(formatted("{}: cannot be opened: {}.", path_, file.problem()), "check the path.");
  if (!file.is_open()) fail_to_read(path_, "cannot be opened", file.code());
  size_ = file.size();
  file_ = file.release();
  if (!sums_) return;
  if (sums_->size != size_) {
    ::close(file_);
    throw Damaged(
        formatted("{}: has {} bytes, but had {} when it was saved.", path_, size_, sums_->size),
        "the file was truncated, copied incompletely, or belongs to another checkpoint; "
        "load another checkpoint.");
  }
  checked_ = std::vector<std::atomic<bool>>(sums_->sums.size());
}

Input::~Input() {
  if (file_ >= 0) ::close(file_);
}

void Input::read_unchecked(int64_t offset, char* into, int64_t size) const {
  while (size > 0) {
    const auto part = std::min(static_cast<size_t>(size), kMostInACall);
    const ssize_t got = ::pread(file_, into, part, offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_to_read(path_, "reading failed", errno);
    if (got == 0)
      throw Damaged(formatted("{}: ends at byte {}, {} bytes too early.", path_, offset, size),
                    "the file is damaged or was copied incompletely; load another checkpoint.");
    into += got;
    offset += got;
    size -= got;
  }
}

void Input::check(int64_t block, const char* bytes, int64_t size) const {
  const auto index = static_cast<size_t>(block);
  if (block_sum(bytes, static_cast<size_t>(size)) != sums_->sums[index])
    throw Damaged(
        formatted("{}: bytes {} to {} differ from what was saved.", path_, block * kSumBlock,
                  block * kSumBlock + size),
        "the file is damaged; load another checkpoint (check it with `fsdp ckpt verify`).");
  checked_[index].store(true, std::memory_order_relaxed);
}

void Input::read_in_block(int64_t offset, char* into, int64_t size) const {
  const int64_t block = offset / kSumBlock, begin = block * kSumBlock;
  const int64_t length = std::min(kSumBlock, size_ - begin);
  if (size == length) {
    read_unchecked(offset, into, size);
    return check(block, into, size);
  }
  if (checked_[static_cast<size_t>(block)].load(std::memory_order_relaxed))
    return read_unchecked(offset, into, size);
  static thread_local std::vector<char> whole(kSumBlock);
  read_unchecked(begin, whole.data(), length);
  check(block, whole.data(), length);
  std::memcpy(into, whole.data() + (offset - begin), static_cast<size_t>(size));
}

void Input::read(int64_t offset, void* into, size_t size) const {
  auto* bytes = static_cast<char*>(into);
  auto left = static_cast<int64_t>(size);
  // Reads beyond the end fail the same way with and without sums.
  if (!sums_ || offset > size_ - left) return read_unchecked(offset, bytes, left);
  while (left > 0) {
    const int64_t part = std::min(left, kSumBlock - offset % kSumBlock);
    read_in_block(offset, bytes, part);
    bytes += part;
    offset += part;
    left -= part;
  }
}

// --- whole files and directories ---

std::string read_whole(const Path& path, int64_t at_most) {
  const Input file(path);
  if (file.size() > at_most)
    throw Error(formatted("{}: has {} bytes; the limit is {}.", path, file.size(), at_most),
                "the file is damaged, or isn't the kind of file that belongs here.");
  std::string bytes(static_cast<size_t>(file.size()), '\0');
  file.read(0, bytes.data(), bytes.size());
  return bytes;
}

std::string read_all(const Path& path, const FileSums* sums) {
  const Input file(path, sums);
  std::string bytes(static_cast<size_t>(file.size()), '\0');
  file.read(0, bytes.data(), bytes.size());
  return bytes;
}

FileSums write_whole(const Path& path, std::string_view bytes) {
  Output file(path);
  file.append(bytes);
  return file.close();
}

void make_directories(const Path& path) {
  std::error_code problem;
  if (path.empty() || std::filesystem::is_directory(path, problem)) return;
  make_directories(path.parent_path());
  make_directory(path);
  sync_directory(path.parent_path());
}

void make_directory(const Path& path) {
  if (change("mkdir", path, [&] { return ::mkdir(path.c_str(), 0777); }) < 0 && errno != EEXIST)
    fail(path, "cannot be created", errno);
}

void sync_directory(const Path& path) {
  const Path named = path.empty() ? Path(".") : path;
  const int directory = ::open(named.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) fail(named, "cannot be opened", errno);
  const int result = change("fsync", named, [&] { return ::fsync(directory); });
  const int code = errno;
  ::close(directory);
  // Some network file systems don't support it, and don't need it.
  if (result < 0 && code != EINVAL && code != ENOTSUP) fail(named, "fsync failed", code);
}

void rename(const Path& from, const Path& to) {
  change_or_fail("rename", to, [&] { return ::rename(from.c_str(), to.c_str()); });
}

bool rename_if_there(const Path& from, const Path& to) {
  if (change("rename", to, [&] { return ::rename(from.c_str(), to.c_str()); }) == 0) return true;
  if (errno != ENOENT) fail(from, "rename failed", errno);
  return false;
}

bool exchange(const Path& one, const Path& other) {
  const int result = change("exchange", other, [&] {
    return ::renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE);
  });
  if (result == 0) return true;
  if (errno == EINVAL || errno == ENOSYS || errno == ENOTSUP) return false;
  fail(other, "rename failed", errno);
}

void remove_file(const Path& path) {
  if (change("unlink", path, [&] { return ::unlink(path.c_str()); }) < 0 && errno != ENOENT)
    fail(path, "cannot be removed", errno);
}

void remove_directory(const Path& path) {
  if (change("rmdir", path, [&] { return ::rmdir(path.c_str()); }) < 0 && errno != ENOENT)
    fail(path, "cannot be removed", errno);
}

void make_link(const Path& target, const Path& link) {
  change_or_fail("symlink", link, [&] { return ::symlink(target.c_str(), link.c_str()); });
}

}  // namespace fsdp::checkpoint::files
