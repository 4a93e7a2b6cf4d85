// Files that the program reads, and the places of files that it writes. Anything may stand at a
// path: opening a FIFO would wait for its other end, and some devices never end or do harm. So a
// path is opened without waiting, and what is there is looked at before the first read. All of src
// opens files for reading here; a test checks that (tests/structure/includes_test.py).
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "base/namespace.h"

namespace fsdp::base {

class RegularFile {
 public:
  explicit RegularFile(std::filesystem::path path);  // doesn't throw if it can't be opened
  ~RegularFile();
  RegularFile(const RegularFile&) = delete;
  RegularFile& operator=(const RegularFile&) = delete;

  bool is_open() const { return descriptor_ >= 0; }
  // Why it isn't open, as the end of a sentence: "it is a FIFO", "No such file or directory".
  const std::string& problem() const { return problem_; }
  int code() const { return code_; }    // the errno of that; 0 if it isn't a regular file
  const RegularFile& or_throw() const;  // throws an Error with the problem

  const std::filesystem::path& path() const { return path_; }
  int descriptor() const { return descriptor_; }
  int release();  // the caller closes it
  int64_t size() const { return size_; }

  // The next bytes, at most `size`; 0 at the end. Throws Error.
  size_t read(char* into, size_t size) const;

 private:
  std::filesystem::path path_;
  std::string problem_;
  int descriptor_ = -1, code_ = 0;
  int64_t size_ = 0;
};

// All of a file. Throws Error if it can't be read or has more bytes than `at_most`.
std::string read_file(const std::filesystem::path& path, int64_t at_most);
// The same of a file that may be missing or unreadable, such as those of /proc: "" then. At most 64
// MiB.
std::string read_if_there(const std::filesystem::path& path);

// The lines of a file, from where it stands.
class LineReader {
 public:
  explicit LineReader(const RegularFile& file)
      : file_(file) {}  // which must be open, and outlive it

  // The next line, without its end; false if there is none. Keeps only the first 16 MiB of a longer
  // one. Throws Error.
  bool next(std::string& line);
  bool complete() const { return complete_; }  // whether the last line had an end

 private:
  const RegularFile& file_;
  std::string part_;  // what was read
  size_t used_ = 0;   // of it
  bool complete_ = true;
};

// Returns `path`; throws Error if something other than a regular file stands there. For files that
// are written.
const std::filesystem::path& place_of_file(const std::filesystem::path& path);

}  // namespace fsdp::base
