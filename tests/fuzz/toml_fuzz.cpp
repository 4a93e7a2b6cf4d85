// Our configs. A string that can be read is written in our style and must read the same.
#include <cstdlib>

#include "fsdp/error.h"
#include "train/config_scalar.h"
#include "train/config_toml.h"

namespace toml = fsdp::train::toml;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  toml::Document document;
  try {
    document = toml::parse({reinterpret_cast<const char*>(data), size}, "fuzzed");
  } catch (const fsdp::Error&) {
    return 0;
  }
  for (const auto& entry : document.entries) {
    const auto* text = std::get_if<std::string>(&entry.value.held);
    if (!text) continue;
    const auto again = toml::parse("a = " + toml::quoted(*text), "written");
    if (again.entries.size() != 1 || std::get<std::string>(again.entries[0].value.held) != *text)
      std::abort();
  }
  return 0;
}
