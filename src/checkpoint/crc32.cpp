// Three ways to compute the same sum: with tables, on any processor; with the CRC instruction of
// aarch64; by folding on x86_64, whose CRC instruction is for another polynomial.
//
// Folding: the sum is the remainder of the message, as a polynomial over bits, divided by P. The
// message so far is kept as 16 bytes with the same remainder. Before D more bits are added, these
// are multiplied by x^D mod P, a constant of 32 bits, so they stay short. Four such lanes take
// turns, because a multiplication has more latency than issue time.
#include "checkpoint/crc32.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#define FSDP_FOLDS __attribute__((target("pclmul")))
#endif

namespace fsdp::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr size_t kStride = 16;                // bytes per round of the tables
constexpr uint32_t kPolynomial = 0xedb88320;  // P without x^32; the lowest bit is x^31

constexpr uint32_t times_x(uint32_t value) {  // modulo P
  return value >> 1 ^ (value & 1 ? kPolynomial : 0);
}

// Table k: the effect of a byte on the sum k bytes later.
constexpr auto kTables = [] {
  std::array<std::array<uint32_t, 256>, kStride> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t sum = byte;
    for (int bit = 0; bit < 8; ++bit) sum = times_x(sum);
    tables[0][byte] = sum;
  }
  for (size_t k = 1; k < kStride; ++k)
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = before >> 8 ^ tables[0][before & 0xff];
    }
  return tables;
}();

// From here on `sum` is the remainder itself; a CRC is its complement.

uint32_t by_bytes(uint32_t sum, const unsigned char* data, size_t size) {
  for (size_t i = 0; i < size; ++i) sum = sum >> 8 ^ kTables[0][(sum ^ data[i]) & 0xff];
  return sum;
}

uint32_t by_tables(uint32_t sum, const unsigned char* data, size_t size) {
  for (; size >= kStride; size -= kStride, data += kStride) {
    uint32_t words[4];
    std::memcpy(words, data, kStride);
    words[0] ^= sum;
    sum = 0;
    for (size_t w = 0; w < 4; ++w)
      for (size_t b = 0; b < 4; ++b)
        sum ^= kTables[kStride - 1 - 4 * w - b][words[w] >> (8 * b) & 0xff];
  }
  return by_bytes(sum, data, size);
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

#if defined(__x86_64__)
constexpr size_t kLane = 16;               // bytes
constexpr size_t kLanes = 4;               // that take turns
constexpr size_t kRound = kLanes * kLane;  // bytes

// x^n modulo P, in the upper half of a word whose lowest bit is x^63.
constexpr uint64_t power(unsigned n) {
  uint32_t value = 0x80000000;  // 1
  for (unsigned i = 0; i < n; ++i) value = times_x(value);
  return uint64_t{value} << 32;
}

// The factors that move a lane on by `bytes`. The lowest bit of a lane is x^127, so its first half
// stands for x^64 times its value. A product of two words whose lowest bits are x^63 has x^126 as
// its lowest bit: read as a lane it is too large by a factor of x, so the factors have one x less.
struct Factors {
  uint64_t first, second;
};
constexpr Factors move_by(unsigned bytes) {
  return {power(8 * bytes + 64 - 1), power(8 * bytes - 1)};
}

using Lane = __m128i;
FSDP_FOLDS inline Lane load(const unsigned char* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
FSDP_FOLDS inline Lane pair(uint64_t first, uint64_t second) {
  return _mm_set_epi64x(static_cast<int64_t>(second), static_cast<int64_t>(first));
}
FSDP_FOLDS inline Lane add(Lane a, Lane b) {
  return _mm_xor_si128(a, b);
}
FSDP_FOLDS inline Lane moved(Lane lane, Lane factors) {
  return _mm_xor_si128(_mm_clmulepi64_si128(lane, factors, 0x00),   // first by first
                       _mm_clmulepi64_si128(lane, factors, 0x11));  // second by second
}
bool can_fold() {
  static const bool can = __builtin_cpu_supports("pclmul");
  return can;
}

// Needs at least one round of data.
FSDP_FOLDS uint32_t by_folding(uint32_t sum, const unsigned char* data, size_t size) {
  constexpr Factors kNextRound = move_by(kRound), kNextLane = move_by(kLane);
  Lane lanes[kLanes];
  for (size_t i = 0; i < kLanes; ++i) lanes[i] = load(data + i * kLane);
  // Adds the sum so far to the first bits of the data, as the other ways do.
  lanes[0] = add(lanes[0], pair(sum, 0));
  data += kRound, size -= kRound;
  const Lane by_round = pair(kNextRound.first, kNextRound.second);
  for (; size >= kRound; data += kRound, size -= kRound)
    for (size_t i = 0; i < kLanes; ++i)
      lanes[i] = add(moved(lanes[i], by_round), load(data + i * kLane));
  const Lane by_lane = pair(kNextLane.first, kNextLane.second);
  Lane last = lanes[0];
  for (size_t i = 1; i < kLanes; ++i) last = add(moved(last, by_lane), lanes[i]);
  for (; size >= kLane; data += kLane, size -= kLane) last = add(moved(last, by_lane), load(data));
  unsigned char bytes[kLane];
  std::memcpy(bytes, &last, kLane);
  return by_tables(by_tables(0, bytes, kLane), data, size);
}
#endif

}  // namespace

uint32_t crc32_by_tables(uint32_t crc, const void* data, size_t size) {
  return ~by_tables(~crc, static_cast<const unsigned char*>(data), size);
}

uint32_t crc32(uint32_t crc, const void* data, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
#if defined(__aarch64__)
  if (has_instruction()) return ~by_instruction(~crc, bytes, size);
#elif defined(__x86_64__)
  if (size >= kRound && can_fold()) return ~by_folding(~crc, bytes, size);
#endif
  return ~by_tables(~crc, bytes, size);
}

}  // namespace fsdp::checkpoint
