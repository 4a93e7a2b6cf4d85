#include "checkpoint/crc32.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace fsdp::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr size_t kStride = 16;  // bytes a round of the tables

// Table k: what a byte does to the sum k bytes later.
constexpr auto kTables = [] {
  std::array<std::array<uint32_t, 256>, kStride> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t sum = byte;
    for (int bit = 0; bit < 8; ++bit) sum = sum >> 1 ^ (sum & 1 ? 0xedb88320u : 0);
    tables[0][byte] = sum;
  }
  for (size_t k = 1; k < kStride; ++k)
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = before >> 8 ^ tables[0][before & 0xff];
    }
  return tables;
}();

uint32_t by_bytes(uint32_t sum, const unsigned char* data, size_t size) {
  for (size_t i = 0; i < size; ++i) sum = sum >> 8 ^ kTables[0][(sum ^ data[i]) & 0xff];
  return sum;
}

#if defined(__aarch64__)
__attribute__((target("+crc"))) uint32_t by_instruction(uint32_t sum, const unsigned char* data,
                                                        size_t size) {
  size_t i = 0;
  for (; i + 8 <= size; i += 8) {
    uint64_t word;
    std::memcpy(&word, data + i, 8);
    sum = __builtin_aarch64_crc32x(sum, word);
  }
  for (; i < size; ++i) sum = __builtin_aarch64_crc32b(sum, data[i]);
  return sum;
}

bool has_instruction() {
  static const bool has = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
  return has;
}
#endif

}  // namespace

uint32_t crc32_by_tables(uint32_t crc, const void* data, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint32_t sum = ~crc;
  for (; size >= kStride; size -= kStride, bytes += kStride) {
    uint32_t words[4];
    std::memcpy(words, bytes, kStride);
    words[0] ^= sum;
    sum = 0;
    for (size_t w = 0; w < 4; ++w)
      for (size_t b = 0; b < 4; ++b)
        sum ^= kTables[kStride - 1 - 4 * w - b][words[w] >> (8 * b) & 0xff];
  }
  return ~by_bytes(sum, bytes, size);
}

uint32_t crc32(uint32_t crc, const void* data, size_t size) {
#if defined(__aarch64__)
  if (has_instruction())
    return ~by_instruction(~crc, static_cast<const unsigned char*>(data), size);
#endif
  return crc32_by_tables(crc, data, size);
}

}  // namespace fsdp::checkpoint
