// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104): proofs of a run's secret (base/handshake.h),
// and names that can't be guessed from each other.
#pragma once

#include <string>
#include <string_view>

#include "base/namespace.h"

namespace fsdp::base {

inline constexpr size_t kSha256Bytes = 32;

std::string sha256(std::string_view data);  // kSha256Bytes bytes
std::string hmac_sha256(std::string_view key, std::string_view data);

// Compares all bytes however early they differ, so that the time doesn't tell where.
bool equal_in_constant_time(std::string_view a, std::string_view b);

std::string to_hex(std::string_view bytes);

}  // namespace fsdp::base
