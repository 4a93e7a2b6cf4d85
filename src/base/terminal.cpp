#include "base/terminal.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace fsdp {

bool has_colour(Stream stream) {
  if (!isatty(stream) || std::getenv("NO_COLOR")) return false;
  const char* term = std::getenv("TERM");
  return term && std::strcmp(term, "dumb") != 0;
}

std::string paint(Stream stream, const char* colour, const std::string& text) {
  if (!*colour || !has_colour(stream)) return text;
  return "\x1b[" + std::string(colour) + "m" + text + "\x1b[0m";
}

}  // namespace fsdp
