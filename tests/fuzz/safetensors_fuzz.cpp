// The header of a safetensors file. The first 4 bytes give the number of tensor bytes after it, so
// that sizes can match without the tensors.
#include <cstdlib>
#include <cstring>

#include "checkpoint/safetensors.h"
#include "fsdp/error.h"

namespace checkpoint = fsdp::checkpoint;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint32_t behind = 0;
  if (size < sizeof behind) return 0;
  std::memcpy(&behind, data, sizeof behind);
  data += sizeof behind, size -= sizeof behind;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const int64_t file_size = static_cast<int64_t>(size) + behind;
  checkpoint::SafeHeader header;
  try {
    header = checkpoint::parse_header(bytes, file_size, "fuzzed");
  } catch (const fsdp::Error&) {
    return 0;
  }
  int64_t end = 0;
  for (const auto& tensor : header.tensors) {
    if (tensor.begin != end || tensor.end < tensor.begin) std::abort();
    end = tensor.end;
  }
  if (header.data < 8 || header.data + end != file_size) std::abort();
  // What was read is written and must read the same.
  const std::string written = checkpoint::encode_header(header.tensors, header.metadata);
  const auto again =
      checkpoint::parse_header(written, static_cast<int64_t>(written.size()) + end, "written");
  if (checkpoint::encode_header(again.tensors, again.metadata) != written) std::abort();
  return 0;
}
