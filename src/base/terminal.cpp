#include "base/terminal.h"

#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace fsdp::base {

int terminal_width(Stream stream) {
  winsize size{};
  if (isatty(stream)) {
    bool known = ioctl(stream, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return known ? size.ws_col : 80;
  }
  // Only a pipe can lead to the launcher; a file that a rank writes to isn't a terminal.
  struct stat file {};
  const char* launcher = stream == STDOUT ? std::getenv("FSDP_TERMINAL") : nullptr;
  bool pipe = launcher && fstat(stream, &file) == 0 && S_ISFIFO(file.st_mode);
  return pipe ? std::max(0, std::atoi(launcher)) : 0;
}

bool has_colour(Stream stream) {
  if (terminal_width(stream) == 0 || std::getenv("NO_COLOR")) return false;
  const char* term = std::getenv("TERM");
  return term && std::strcmp(term, "dumb") != 0;
}

std::string paint(Stream stream, const char* colour, const std::string& text) {
  if (!*colour || !has_colour(stream)) return text;
  return "\x1b[" + std::string(colour) + "m" + text + "\x1b[0m";
}

}  // namespace fsdp::base
