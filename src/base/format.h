// printf into a std::string, for numbers with a width and a precision.
#pragma once

#include <cstdio>
#include <string>

namespace fsdp {

// At most 255 characters; longer text is truncated.
template <typename... Values>
std::string format(const char* pattern, Values... values) {
  char text[256];
  std::snprintf(text, sizeof text, pattern, values...);
  return text;
}

}  // namespace fsdp
