// What the terminal can show: colours only where somebody looks, never in a file or a pipe.
#pragma once

#include <string>

namespace fsdp {

enum Stream { STDOUT = 1, STDERR = 2 };

// Columns of the terminal that a stream is shown on; 0 if it is none. A rank's stdout is a pipe to
// its launcher, which tells the columns of its own terminal by FSDP_TERMINAL.
int terminal_width(Stream stream);

// True on a terminal, unless NO_COLOR is set or TERM is dumb.
bool has_colour(Stream stream);

// `text` in an SGR colour ("31" red, "32" green, "33" yellow, "1" bold), or as it is without one.
std::string paint(Stream stream, const char* colour, const std::string& text);

}  // namespace fsdp
