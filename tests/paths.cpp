#include "paths.h"

namespace fsdp::paths {

std::string program(const std::string& name) {
  return FSDP_PROGRAMS "/" + name;
}

std::string source(const std::string& file) {
  return FSDP_SOURCES "/" + file;
}

}  // namespace fsdp::paths
