// MappedFile of src/data on heap memory, where the address sanitizer sees a read past the end. A
// real mapping continues to the end of its page.
#pragma once

#include <map>
#include <string>

namespace fsdp::fuzz {

std::map<std::string, std::string>& mapped_files();  // contents by path

}  // namespace fsdp::fuzz
