// MappedFile of src/data over memory of the heap, where the address sanitizer sees a read beyond
// the end. Behind the end of a real mapping lies the rest of a page.
#pragma once

#include <map>
#include <string>

namespace fsdp::fuzz {

std::map<std::string, std::string>& mapped_files();  // contents by path

}  // namespace fsdp::fuzz
