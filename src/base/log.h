// Lines for people, on stderr: "fsdp: rank 3: text". The rank appears once a world of more than one
// is joined. Errors are exceptions (fsdp/error.h); this is for what is worth saying beside them.
#pragma once

#include <string>

namespace fsdp::log {

void set_rank(int rank, int world);  // called by init()
void info(const std::string& text);
void warn(const std::string& text);
// What `main` prints for an exception that reached it.
void error(const std::exception& failure);

}  // namespace fsdp::log
