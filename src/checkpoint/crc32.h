// CRC-32 as zip archives use it (polynomial 0xedb88320, reflected).
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdp::checkpoint {

// Of `size` bytes that follow what `crc` is the sum of; 0 to begin with. Uses the processor's own
// instruction where it has one.
uint32_t crc32(uint32_t crc, const void* data, size_t size);

// The same by tables alone, on any processor.
uint32_t crc32_by_tables(uint32_t crc, const void* data, size_t size);

}  // namespace fsdp::checkpoint
