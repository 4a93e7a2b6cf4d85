// CRC-32 as zip archives use it (polynomial 0xedb88320, reflected).
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdp::checkpoint {

// Extends `crc`, the sum of all bytes so far (0 at the start), by `size` bytes. Uses the
// processor's own instructions if it has them.
uint32_t crc32(uint32_t crc, const void* data, size_t size);

// The same by tables alone, on any processor.
uint32_t crc32_by_tables(uint32_t crc, const void* data, size_t size);

}  // namespace fsdp::checkpoint
