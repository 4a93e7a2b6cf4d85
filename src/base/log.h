// Log lines on stderr: "fsdp: rank 3: text". The rank appears once the process has joined a world
// of more than one. Errors are exceptions (fsdp/error.h); this is for everything else.
#pragma once

#include <string>

namespace fsdp::log {

void set_rank(int rank, int world);  // called by init()
void info(const std::string& text);
void warn(const std::string& text);
// Prints an exception, once: whoever catches it where the run fails prints it before destructors
// run, which may wait for other ranks, and rethrows; `main` prints what nobody has printed.
void error(const std::exception& failure);
// what() without the stack that LibTorch appends to it.
std::string plain(const std::exception& failure);

// A live line stands on the terminal (observe/progress.h): log lines clear it before they print.
void set_live_line(bool drawn);
bool has_live_line();  // may be called in a signal handler

}  // namespace fsdp::log
