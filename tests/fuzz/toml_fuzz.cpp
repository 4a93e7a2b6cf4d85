// Our configs. A string that can be read is written in our style and must read the same.
#include <cstdlib>

#include "fsdp/error.h"
#include "train/config_toml.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fsdp::train;
  TomlDocument document;
  try {
    document = parse_toml({reinterpret_cast<const char*>(data), size}, "fuzzed");
  } catch (const fsdp::Error&) {
    return 0;
  }
  for (const TomlEntry& entry : document.entries) {
    const auto* text = std::get_if<std::string>(&entry.value);
    if (!text) continue;
    const TomlDocument again = parse_toml("a = " + toml_string(*text), "written");
    if (again.entries.size() != 1 || std::get<std::string>(again.entries[0].value) != *text)
      std::abort();
  }
  return 0;
}
