// Reads and writes the header of a safetensors file.
//
//   length, 8 bytes little-endian | JSON of that length | the tensors' bytes
//
// The JSON is an object: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …},
// plus "__metadata__", a map of strings. Offsets count from the start of the tensors' bytes, and
// the tensors fill everything from there to the end of the file.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files.h"

namespace fsdp::checkpoint {

inline constexpr int64_t kLargestSafeHeader = 100'000'000;  // bytes of JSON; more is refused

struct SafeTensor {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  int64_t begin = 0, end = 0;  // bytes from the start of the tensors
};

using SafeMetadata = std::map<std::string, std::string>;

struct SafeHeader {
  int64_t data = 0;                 // offset of the tensors in the file
  std::vector<SafeTensor> tensors;  // by offset
  SafeMetadata metadata;
};

// Parses the header of a file of `file_size` bytes; `bytes` is its start, with the whole header.
// For any input, the result is valid or there is an Error. Valid means that dtypes are known, names
// are unique, each tensor has the bytes of its shape, and together they fill the rest of the file,
// without gaps and overlaps. `where` names the file in errors.
SafeHeader parse_header(std::string_view bytes, int64_t file_size, const std::string& where);
SafeHeader read_header(const files::Input& file);

// The header with its length, padded with spaces so that the tensors start at a multiple of 8.
// `tensors` must be sorted by offset and without gaps.
std::string encode_header(const std::vector<SafeTensor>& tensors, const SafeMetadata& metadata);

const char* safetensors_name(at::ScalarType type);  // "F32"; an Error if the type has no name
std::optional<at::ScalarType> safetensors_dtype(std::string_view name);

}  // namespace fsdp::checkpoint
