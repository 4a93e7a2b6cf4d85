// What ranks send each other through the store and collectives when they save and load. The first
// byte chooses the message; what can be read is written and must read the same.
#include "checkpoint/messages.h"

#include <cstdlib>

#include "fsdp/error.h"

namespace checkpoint = fsdp::checkpoint;

namespace {

template <typename Text>
void read(std::string_view text) {
  std::string written;
  try {
    written = Text::decode(text, "fuzzed").encode();
  } catch (const fsdp::Error&) {
    return;
  }
  if (Text::decode(written, "written").encode() != written) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data + 1), size - 1);
  switch (data[0] % 3) {
    case 0:
      read<checkpoint::Outcome>(text);
      break;
    case 1:
      read<checkpoint::FirstPiece>(text);
      break;
    default:
      read<checkpoint::SaveReport>(text);
  }
  return 0;
}
