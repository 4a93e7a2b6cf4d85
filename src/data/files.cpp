#include "data/files.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/file_error.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "fsdp/error.h"

namespace fsdp::data {

namespace fs = std::filesystem;

FoundFile describe_file(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) {
    throw Error(formatted("can't read {}: {}.", path, errno_text(errno)), file_hint(errno));
  }
  return {path, status.st_size,
          int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec};
}

std::vector<FoundFile> files_below(const std::string& folder) {
  std::vector<FoundFile> found;
  std::error_code problem;
  fs::recursive_directory_iterator at(folder, fs::directory_options::skip_permission_denied,
                                      problem),
      end;
  if (problem)
    throw Error(formatted("can't read {}: {}.", folder, problem.message()),
                file_hint(problem.value()));
  for (; at != end; at.increment(problem)) {
    if (problem)
      throw Error(formatted("can't read {}: {}.", folder, problem.message()),
                  file_hint(problem.value()));
    if (at->path().filename().string().starts_with(".")) {
      if (at->is_directory(problem)) at.disable_recursion_pending();
      continue;
    }
    if (!at->is_regular_file(problem)) continue;
    FoundFile file = describe_file(at->path().string());
    if (file.bytes > 0) found.push_back(std::move(file));
  }
  std::sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.path < b.path; });
  return found;
}

std::vector<FoundFile> text_files_below(const std::string& folder) {
  auto files = files_below(folder);
  std::erase_if(files, [](const FoundFile& file) {
    std::string extension = fs::path(file.path).extension().string();
    return extension == ".bin" || extension == ".idx" || extension == ".mask" ||
           looks_binary(file.path);
  });
  return files;
}

bool is_json_lines(const std::string& path) {
  return fs::path(path).extension() == ".jsonl";
}

std::vector<FoundFile> json_lines_below(const std::string& folder) {
  auto files = text_files_below(folder);
  std::erase_if(files, [](const FoundFile& file) {
    const std::string name = fs::path(file.path).filename().string();
    return name.starts_with("README") || name.starts_with("LICENSE");
  });
  for (const FoundFile& file : files)
    if (!is_json_lines(file.path)) return {};
  return files;
}

bool looks_binary(const std::string& path) {
  char front[8192];
  const RegularFile file(path);
  return std::memchr(front, 0, file.or_throw().read(front, sizeof front)) != nullptr;
}

}  // namespace fsdp::data
