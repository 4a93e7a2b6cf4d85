// Which files a list of paths means.
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

// The files below a folder, sorted by path. Hidden ones and hidden folders are left out, links to
// folders are not followed, and files without a byte do not count.
std::vector<FoundFile> files_below(const std::string& folder);
// Those of them that are text: not binary, and no token files (.bin, .idx, .mask).
std::vector<FoundFile> text_files_below(const std::string& folder);
FoundFile describe_file(const std::string& path);  // throws Error if it is not there

// A file with a zero byte near its beginning is not text.
bool looks_binary(const std::string& path);

}  // namespace fsdp::data
