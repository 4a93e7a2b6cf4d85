// printable: text for a terminal and for logs. Names in it may come from files and from other
// machines, so whatever could act on a terminal is escaped. Every Error and every log line is
// printable.
#pragma once

#include <string>
#include <string_view>

#include "base/namespace.h"

namespace fsdp::base {

// Control characters other than newline and tab, marks that change the direction of text, and bytes
// that aren't UTF-8 become "\x1b" and so on. A line keeps its beginning and its end if it is longer
// than 4,000 bytes, and so does text of more than 1,000 lines. Printable text stays as it is.
std::string printable(std::string_view text);

}  // namespace fsdp::base
