// DataFile of src/data in memory. A read past the end ends the process; a real one is an Error.
#pragma once

#include <map>
#include <string>

namespace fsdp::fuzz {

std::map<std::string, std::string>& files_in_memory();  // contents by path

}  // namespace fsdp::fuzz
