#include "base/hidden_sve.h"

#include <cstdlib>
#include <string>

#include "base/regular_file.h"

namespace fsdp::base {
namespace {

// "CPU part\t: 0xd40" -> "0xd40" for the key "CPU part".
std::string_view value_of(std::string_view line, std::string_view key) {
  if (!line.starts_with(key)) return {};
  size_t colon = line.find(':');
  if (colon == std::string_view::npos) return {};
  line.remove_prefix(colon + 1);
  size_t first = line.find_first_not_of(" \t");
  return first == std::string_view::npos ? std::string_view{} : line.substr(first);
}

bool set_nvpl_variable() {
  return !std::getenv(kNvplVariable) && this_machine_hides_sve() &&
         setenv(kNvplVariable, "1", /*overwrite=*/0) == 0;
}

const bool nvpl_variable_set = set_nvpl_variable();  // at load time, before any matrix product

}  // namespace

bool hides_sve(std::string_view cpuinfo) {
  bool affected = false;
  while (!cpuinfo.empty()) {
    size_t end = cpuinfo.find('\n');
    std::string_view line = cpuinfo.substr(0, end);
    std::string_view part = value_of(line, "CPU part"), features = value_of(line, "Features");
    if (part == "0xd40" || part == "0xd4f") affected = true;
    if ((" " + std::string(features) + " ").find(" sve ") != std::string::npos) return false;
    if (end == std::string_view::npos) break;
    cpuinfo.remove_prefix(end + 1);
  }
  return affected;
}

bool this_machine_hides_sve() {
#ifdef __aarch64__
  return hides_sve(read_if_there("/proc/cpuinfo"));
#else
  return false;
#endif
}

bool nvpl_variable_was_set_by_us() {
  return nvpl_variable_set;
}

}  // namespace fsdp::base
