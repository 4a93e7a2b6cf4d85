// Failed calls on files: what to do about each errno, in one table for everything that opens, reads
// and writes files.
#pragma once

#include <string>

#include "base/namespace.h"

namespace fsdp::base {

std::string errno_text(int code);  // "No space left on device"

// A hint for the errno of a failed call on a file.
std::string file_hint(int code);

// A write beyond the limit on file sizes (ulimit -f) then fails with EFBIG. By default the kernel
// sends SIGXFSZ, which kills the process. A handler of the program stays.
void ignore_size_signal();

// Raises the limit on open files to what the process may set itself.
void allow_many_files();

}  // namespace fsdp::base
