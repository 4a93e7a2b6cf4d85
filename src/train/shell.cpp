#include "train/shell.h"

#include <unistd.h>

#include <sstream>

#include "base/environment.h"
#include "base/regular_file.h"
#include "base/subprocess.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;

bool is_program(const fs::path& path) {
  std::error_code problem;
  return fs::is_regular_file(path, problem) && access(path.c_str(), X_OK) == 0;
}

// The wrapper script of the checkout that a build folder belongs to; empty for an installed binary.
fs::path wrapper_of(const fs::path& binary) {
  std::istringstream cache(read_if_there(binary.parent_path().parent_path() / "CMakeCache.txt"));
  const std::string key = "CMAKE_HOME_DIRECTORY:INTERNAL=";
  for (std::string line; std::getline(cache, line);) {
    if (!line.starts_with(key)) continue;
    fs::path wrapper = fs::path(line.substr(key.size())) / "fsdp";
    return is_program(wrapper) ? wrapper : fs::path();
  }
  return {};
}

// The program that a shell runs for "fsdp", or an empty path.
fs::path found_by_shell(const std::string& search) {
  std::istringstream folders(search);
  for (std::string folder; std::getline(folders, folder, ':');) {
    fs::path program = fs::path(folder.empty() ? "." : folder) / "fsdp";
    std::error_code problem;
    if (is_program(program)) return fs::canonical(program, problem);
  }
  return {};
}

// Below `directory` as ./PATH, else the shorter of the relative and the absolute path.
std::string seen_from(const fs::path& directory, const fs::path& path) {
  std::string relative = path.lexically_relative(directory).string();
  if (relative.empty()) return path.string();
  if (!relative.starts_with("..")) return "./" + relative;
  return relative.size() < path.string().size() ? relative : path.string();
}

}  // namespace

std::string shell_word(const std::string& text) {
  const char* plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:=@%+,-";
  if (!text.empty() && text.find_first_not_of(plain) == std::string::npos) return text;
  std::string word = "'";
  for (char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

std::string fsdp_command(const fs::path& binary, const fs::path& directory,
                         const std::string& search) {
  fs::path wrapper = wrapper_of(binary), found = found_by_shell(search);
  if (!found.empty() && (found == binary || found == wrapper)) return "fsdp";
  return shell_word(seen_from(directory, wrapper.empty() ? binary : wrapper));
}

std::string fsdp_command() {
  std::error_code problem;
  return fsdp_command(own_binary(), fs::current_path(problem),
                      environment::text("PATH").value_or(""));
}

}  // namespace fsdp::train
