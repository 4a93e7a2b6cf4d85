// Terminal width and colours. Files and pipes never get colours.
#pragma once

#include <string>

#include "base/namespace.h"

namespace fsdp::base {

enum Stream { STDOUT = 1, STDERR = 2 };

// Columns of the terminal behind a stream; 0 if it isn't a terminal. A rank's stdout is a pipe to
// its launcher, which passes the width of its own terminal in FSDP_TERMINAL.
int terminal_width(Stream stream);

// True on a terminal, unless NO_COLOR is set or TERM is dumb.
bool has_colour(Stream stream);

// `text` in an SGR colour ("31" red, "32" green, "33" yellow, "1" bold); unchanged if the stream
// has no colours.
std::string paint(Stream stream, const char* colour, const std::string& text);

}  // namespace fsdp::base
