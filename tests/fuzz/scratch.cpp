#include "fuzz/scratch.h"

#include <stdlib.h>

#include <cstdlib>
#include <fstream>

namespace fsdp::fuzz {
namespace {

namespace fs = std::filesystem;

fs::path& made_folder() {
  static fs::path folder;
  return folder;
}

}  // namespace

const fs::path& scratch_folder() {
  fs::path& folder = made_folder();
  if (!folder.empty()) return folder;
  // In memory if possible: each input writes some files.
  std::error_code problem;
  const fs::path shared = "/dev/shm";
  const fs::path parent = fs::is_directory(shared, problem) ? shared : fs::temp_directory_path();
  std::string made = (parent / "fsdp-fuzz-XXXXXX").string();
  if (!::mkdtemp(made.data())) std::abort();
  return folder = made;
}

void remove_scratch_folder() {
  std::error_code ignored;
  if (!made_folder().empty()) fs::remove_all(made_folder(), ignored);
}

void write_files(const fs::path& folder, std::string_view input,
                 std::initializer_list<std::string_view> names) {
  fs::remove_all(folder);
  fs::create_directories(folder);
  constexpr std::string_view kBegin = "=== ", kEnd = " ===\n";
  size_t at = input.find(kBegin);
  while (at != std::string_view::npos) {
    const size_t name_end = input.find(kEnd, at);
    if (name_end == std::string_view::npos) return;
    const std::string_view name = input.substr(at + kBegin.size(), name_end - at - kBegin.size());
    const size_t begin = name_end + kEnd.size();
    at = input.find(kBegin, begin);
    for (const std::string_view known : names)
      if (name == known)
        std::ofstream(folder / known, std::ios::binary)
            << input.substr(begin, (at == std::string_view::npos ? input.size() : at) - begin);
  }
}

}  // namespace fsdp::fuzz
