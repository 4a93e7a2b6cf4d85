// Where tests find programs and files. Only paths.cpp is compiled with absolute paths, so a
// compiler cache can share all other objects between clones.
#pragma once

#include <string>

namespace fsdp::paths {

std::string program(const std::string& name);  // of this build
std::string source(const std::string& file);   // of the tree

}  // namespace fsdp::paths
