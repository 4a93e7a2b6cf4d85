// `.metadata`: what can be read is written and must read the same.
#include <cstdlib>

#include "checkpoint/metadata.h"
#include "fsdp/error.h"

namespace checkpoint = fsdp::checkpoint;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  checkpoint::Metadata metadata;
  try {
    metadata = checkpoint::decode({reinterpret_cast<const char*>(data), size}, "fuzzed");
  } catch (const fsdp::Error&) {
    return 0;
  }
  const std::string written = checkpoint::encode(metadata);
  if (checkpoint::encode(checkpoint::decode(written, "written")) != written) std::abort();
  return 0;
}
