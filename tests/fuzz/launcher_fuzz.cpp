// Messages between launchers, a line each: what can be read is written and must read the same.
// The handshake before them is in store_fuzz.cpp.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "fsdp/error.h"
#include "launch/messages.h"

namespace launch = fsdp::launch;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  while (!rest.empty()) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    try {
      const std::string written = launch::encode(launch::decode(line));
      if (launch::encode(launch::decode(written)) != written) std::abort();
      if (written.find('\n') != std::string::npos) std::abort();
    } catch (const fsdp::Error&) {
    }
  }
  return 0;
}
