#include "checkpoint/safetensors.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

using at::ScalarType;
using Json = nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kHeaderAlignment = 8;
constexpr size_t kLongestTensorName = 4096;
constexpr size_t kMostDimensions = 64;
constexpr std::string_view kMetadataKey = "__metadata__";

struct SafetensorsName {
  ScalarType type;
  const char* name;
};

constexpr SafetensorsName kSafetensorsNames[] = {
    {ScalarType::Float, "F32"},
    {ScalarType::BFloat16, "BF16"},
    {ScalarType::Half, "F16"},
    {ScalarType::Double, "F64"},
    {ScalarType::Long, "I64"},
    {ScalarType::Int, "I32"},
    {ScalarType::Short, "I16"},
    {ScalarType::Char, "I8"},
    {ScalarType::Byte, "U8"},
    {ScalarType::Bool, "BOOL"},
    {ScalarType::UInt16, "U16"},
    {ScalarType::UInt32, "U32"},
    {ScalarType::UInt64, "U64"},
    {ScalarType::Float8_e4m3fn, "F8_E4M3"},
    {ScalarType::Float8_e5m2, "F8_E5M2"},
};

[[noreturn]] void fail(const std::string& where, const std::string& what) {
  throw Error(formatted("{}: {}.", where, what),
              "it isn't a safetensors file, or is truncated or damaged; download or copy it "
              "again.");
}

// The bytes of the elements; nullopt on overflow. The other sizes of an empty tensor must not
// overflow either: strides are computed from them.
std::optional<int64_t> bytes_of(const SafeTensor& tensor) {
  int64_t bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  bool empty = false;
  for (int64_t size : tensor.sizes) {
    empty |= size == 0;
    if (size > 0 && __builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  return empty ? 0 : bytes;
}

// Builds the header while it is parsed, so that nothing unexpected is kept. Callbacks throw Errors.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  HeaderReader(SafeHeader& header, const std::string& where) : header_(header), where_(where) {}

  bool start_object(size_t) override {
    if (at_ == kBegin) return go(kRoot);
    if (at_ != kRootValue) refuse("an object");
    if (key_ == kMetadataKey) return go(kMetadata);
    header_.tensors.push_back({key_, ScalarType::Undefined, {}, -1, -1});
    has_shape_ = false;
    return go(kTensor);
  }

  bool end_object() override {
    if (at_ == kRoot) return go(kEnd);
    if (at_ == kTensor) check_tensor();
    return go(kRoot);
  }

  bool key(string_t& key) override {
    switch (at_) {
      case kRoot:
        check_name(key);
        if (!names_.insert(key).second) fail(where_, formatted("has two entries \"{}\"", key));
        key_ = key;
        return go(kRootValue);
      case kMetadata:
        if (header_.metadata.contains(key))
          fail(where_, "has two metadata entries of the same name");
        text_ = key;
        return go(kMetadataValue);
      default:
        return tensor_key(key);
    }
  }

  bool string(string_t& text) override {
    if (at_ == kMetadataValue) {
      header_.metadata.emplace(text_, text);
      return go(kMetadata);
    }
    if (at_ != kDtype) refuse("a string");
    const auto type = safetensors_dtype(text);
    if (!type) fail(where_, formatted("\"{}\" has the unknown dtype \"{}\"", key_, shown(text)));
    tensor().dtype = *type;
    return go(kTensor);
  }

  bool start_array(size_t) override {
    if (at_ == kShapeValue) return go(kShape);
    if (at_ == kOffsetsValue) return go(kOffsets);
    refuse("a list");
  }

  bool end_array() override {
    if (at_ == kOffsets && offsets_ != 2) refuse("a list of the wrong length");
    return go(kTensor);
  }

  bool number_unsigned(number_unsigned_t number) override {
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      refuse("a number that is too large");
    const auto value = static_cast<int64_t>(number);
    if (at_ == kShape) {
      if (tensor().sizes.size() >= kMostDimensions) refuse("a tensor of more than 64 dimensions");
      tensor().sizes.push_back(value);
      return true;
    }
    if (at_ != kOffsets) refuse("a number");
    if (offsets_ >= 2) refuse("a list of the wrong length");
    (offsets_++ == 0 ? tensor().begin : tensor().end) = value;
    return true;
  }

  bool null() override { refuse("null"); }
  bool boolean(bool) override { refuse("true or false"); }
  bool number_integer(number_integer_t) override { refuse("a negative number"); }
  bool number_float(number_float_t, const string_t&) override { refuse("a fraction"); }
  bool binary(binary_t&) override { refuse("binary data"); }
  bool parse_error(size_t byte, const std::string&, const nlohmann::detail::exception&) override {
    fail(where_, formatted("its header isn't JSON (at character {})", byte));
  }

 private:
  enum At {
    kBegin,
    kRoot,       // between entries
    kRootValue,  // after the name of one
    kMetadata,
    kMetadataValue,
    kTensor,  // between fields of a tensor
    kDtype,
    kShapeValue,
    kShape,
    kOffsetsValue,
    kOffsets,
    kEnd,
  };

  bool go(At to) {
    at_ = to;
    return true;
  }

  SafeTensor& tensor() { return header_.tensors.back(); }

  [[noreturn]] void refuse(const std::string& what) const {
    fail(where_, formatted("its header has {} where that isn't allowed{}", what,
                           key_.empty() ? "" : ", at \"" + key_ + "\""));
  }

  static std::string shown(const std::string& text) {
    const bool plain = text.size() <= 32 && std::all_of(text.begin(), text.end(), [](char c) {
                         return c >= ' ' && c <= '~';
                       });
    return plain ? text : "…";
  }

  // Names are printed, so they must not contain anything that acts on a terminal.
  void check_name(const std::string& name) const {
    const bool plain = std::all_of(name.begin(), name.end(),
                                   [](unsigned char c) { return c >= 0x20 && c != 0x7F; });
    if (name.empty() || name.size() > kLongestTensorName || !plain)
      fail(where_, "has a tensor whose name is empty, too long or has control characters");
  }

  bool tensor_key(const std::string& key) {
    if (key == "dtype" && tensor().dtype == ScalarType::Undefined) return go(kDtype);
    if (key == "shape" && !has_shape_) {
      has_shape_ = true;
      return go(kShapeValue);
    }
    if (key == "data_offsets" && tensor().begin < 0) {
      offsets_ = 0;
      return go(kOffsetsValue);
    }
    fail(where_, formatted("\"{}\" has an unknown or repeated field", key_));
  }

  void check_tensor() {
    const SafeTensor& read = tensor();
    if (read.dtype == ScalarType::Undefined || !has_shape_ || read.end < 0)
      fail(where_, formatted("\"{}\" has no dtype, no shape or no data_offsets", key_));
    const auto bytes = bytes_of(read);
    if (!bytes || read.end < read.begin || read.end - read.begin != *bytes)
      fail(where_,
           formatted("\"{}\" has a different number of bytes than its shape and dtype need", key_));
  }

  SafeHeader& header_;
  const std::string& where_;
  At at_ = kBegin;
  std::string key_;   // of the entry
  std::string text_;  // name of a metadata entry
  std::unordered_set<std::string> names_;
  bool has_shape_ = false;
  int offsets_ = 0;
};

// Checks that the tensors fill the bytes from 0 to `size` without gaps.
void check_places(const SafeHeader& header, int64_t size, const std::string& where) {
  int64_t at = 0;
  for (const auto& tensor : header.tensors) {
    if (tensor.begin != at)
      fail(where,
           formatted("\"{}\" starts at byte {} of the data, but the tensor before it ends at {}",
                     tensor.name, tensor.begin, at));
    at = tensor.end;
  }
  if (at == size) return;
  const std::string last = header.tensors.empty() ? "" : "\"" + header.tensors.back().name + "\" ";
  fail(where, formatted("has {} bytes of data, but its last tensor {}ends at {}", size, last, at));
}

int64_t header_length(std::string_view bytes, int64_t file_size, const std::string& where) {
  if (file_size < kLengthBytes || static_cast<int64_t>(bytes.size()) < kLengthBytes)
    fail(where, formatted("has {} bytes: too few for a header", file_size));
  uint64_t length = 0;
  for (int i = kLengthBytes - 1; i >= 0; --i)
    length = length << 8 | static_cast<unsigned char>(bytes[static_cast<size_t>(i)]);
  if (length > static_cast<uint64_t>(kLargestSafeHeader))
    fail(where,
         formatted("its header would have {} bytes, more than {}", length, kLargestSafeHeader));
  if (length > static_cast<uint64_t>(file_size - kLengthBytes))
    fail(where,
         formatted("its header would have {} bytes, but the file has {}", length, file_size));
  return static_cast<int64_t>(length);
}

std::string json_text(const std::string& text) {
  try {
    return Json(text).dump();
  } catch (const Json::exception&) {
    throw Error("a name or metadata text for a safetensors file is not valid UTF-8.",
                "rename the parameter.");
  }
}

}  // namespace

SafeHeader parse_header(std::string_view bytes, int64_t file_size, const std::string& where) {
  const int64_t length = header_length(bytes, file_size, where);
  if (static_cast<int64_t>(bytes.size()) - kLengthBytes < length)
    fail(where, "its header is incomplete");
  const std::string_view text = bytes.substr(kLengthBytes, static_cast<size_t>(length));
  if (!text.starts_with('{')) fail(where, "its header does not start with {");
  // The parser would take a zero byte for the end of the text.
  if (text.find('\0') != std::string_view::npos) fail(where, "its header isn't JSON");
  SafeHeader header;
  header.data = kLengthBytes + length;
  HeaderReader reader(header, where);
  Json::sax_parse(text.begin(), text.end(), &reader);
  std::sort(header.tensors.begin(), header.tensors.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  check_places(header, file_size - header.data, where);
  return header;
}

SafeHeader read_header(const files::Input& file) {
  const std::string where = file.path().string();
  std::string bytes(static_cast<size_t>(std::min(file.size(), kLengthBytes)), '\0');
  file.read(0, bytes.data(), bytes.size());
  const int64_t length = header_length(bytes, file.size(), where);
  bytes.resize(static_cast<size_t>(kLengthBytes + length));
  file.read(kLengthBytes, bytes.data() + kLengthBytes, static_cast<size_t>(length));
  return parse_header(bytes, file.size(), where);
}

std::string encode_header(const std::vector<SafeTensor>& tensors, const SafeMetadata& metadata) {
  std::string text = "{";
  const auto entry = [&](const std::string& name) {
    if (text.size() > 1) text += ',';
    text += json_text(name) + ":";
  };
  if (!metadata.empty()) {
    entry(std::string(kMetadataKey));
    text += '{';
    for (const auto& [key, value] : metadata)
      text += (text.back() == '{' ? "" : ",") + json_text(key) + ":" + json_text(value);
    text += '}';
  }
  int64_t at = 0;
  for (const auto& tensor : tensors) {
    if (tensor.begin != at || bytes_of(tensor) != tensor.end - tensor.begin)
      throw Error(formatted("\"{}\" has invalid offsets for a safetensors file.", tensor.name),
                  "tensors must be contiguous, each with the bytes of its shape.");
    at = tensor.end;
    entry(tensor.name);
    text += formatted("{{\"dtype\":\"{}\",\"shape\":[", safetensors_name(tensor.dtype));
    for (size_t d = 0; d < tensor.sizes.size(); ++d)
      text += (d ? "," : "") + std::to_string(tensor.sizes[d]);
    text += formatted("],\"data_offsets\":[{},{}]}}", tensor.begin, tensor.end);
  }
  text += '}';
  text.append(static_cast<size_t>(-static_cast<int64_t>(text.size()) & (kHeaderAlignment - 1)),
              ' ');
  std::string length;
  for (int i = 0; i < kLengthBytes; ++i)
    length += static_cast<char>(static_cast<uint64_t>(text.size()) >> (8 * i));
  return length + text;
}

const char* safetensors_name(ScalarType type) {
  for (const auto& named : kSafetensorsNames)
    if (named.type == type) return named.name;
  throw Error(formatted("safetensors files can't hold tensors of type {}.", c10::toString(type)),
              "convert the tensor to another type, such as float32.");
}

std::optional<ScalarType> safetensors_dtype(std::string_view name) {
  for (const auto& named : kSafetensorsNames)
    if (name == named.name) return named.type;
  return std::nullopt;
}

}  // namespace fsdp::checkpoint
