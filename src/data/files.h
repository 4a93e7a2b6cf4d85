// Finding the files that a list of paths means.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::data {

struct FoundFile {
  std::string path;
  int64_t bytes = 0;
  int64_t modified = 0;  // nanoseconds
};

// All files below a folder, sorted by path. Skips hidden files and folders, links to folders, and
// empty files.
std::vector<FoundFile> files_below(const std::string& folder);
// The text files among them: not binary, and not token files (.bin, .idx, .mask).
std::vector<FoundFile> text_files_below(const std::string& folder);
bool is_json_lines(const std::string& path);  // by its name
// The files of JSON lines below a folder whose text files are all such, apart from README and
// LICENSE; else none.
std::vector<FoundFile> json_lines_below(const std::string& folder);
FoundFile describe_file(const std::string& path);  // throws Error if it doesn't exist

// True if the file has a zero byte in its first 8 KiB.
bool looks_binary(const std::string& path);

}  // namespace fsdp::data
