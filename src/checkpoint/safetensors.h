// The header of a safetensors file, read and written.
//
//   length, 8 bytes little-endian | JSON of that length | the tensors' bytes
//
// The JSON is an object: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …},
// and "__metadata__" with texts by name. Offsets count from where the tensors' bytes begin, and
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
  int64_t begin = 0, end = 0;  // bytes, from where the tensors begin
};

using SafeMetadata = std::map<std::string, std::string>;

struct SafeHeader {
  int64_t data = 0;                 // where the tensors begin, in the file
  std::vector<SafeTensor> tensors;  // in the order of their bytes
  SafeMetadata metadata;
};

// Reads the header of a file that has `file_size` bytes, of which `bytes` are the first (with all
// of the header). Whatever is in it: the result is right, or there is an Error. Right means that
// dtypes are known, names are different, each tensor has the bytes of its shape, and together they
// are the rest of the file, without holes and overlaps. `where` names the file in errors.
SafeHeader parse_header(std::string_view bytes, int64_t file_size, const std::string& where);
SafeHeader read_header(const files::Input& file);

// The header with its length, padded with spaces so that the tensors begin at a multiple of 8.
// `tensors` must be in the order of their bytes and without holes.
std::string encode_header(const std::vector<SafeTensor>& tensors, const SafeMetadata& metadata);

const char* safetensors_name(at::ScalarType type);  // "F32"; an Error for what has none
std::optional<at::ScalarType> safetensors_dtype(std::string_view name);

}  // namespace fsdp::checkpoint
