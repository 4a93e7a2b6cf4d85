#include "data/precompiled.h"

#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/format.h"
#include "data/clusters.h"
#include "data/unicode.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

constexpr size_t kShortCluster = 6;  // bytes from which on a cluster isn't looked up

// nullopt: not base64.
std::optional<std::string> from_base64(std::string_view text) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  if (text.size() % 4 != 0) return std::nullopt;
  while (text.ends_with('=')) text.remove_suffix(1);
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3 + 3);
  uint32_t held = 0;
  int bits = 0;
  for (const char c : text) {
    const size_t digit = kDigits.find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    held = held << 6 | static_cast<uint32_t>(digit);
    bits += 6;
    if (bits < 8) continue;
    bits -= 8;
    bytes += static_cast<char>(held >> bits & 0xff);
  }
  return bytes;
}

// A unit of the double array: the byte that leads to it, where its children are, and whether a text
// ends here.
struct ArrayUnit {
  uint32_t bits;
  uint32_t byte() const { return bits & (uint32_t{1} << 31 | 0xff); }
  size_t children() const { return static_cast<size_t>(bits >> 10) << ((bits & 1 << 9) >> 6); }
  bool has_value() const { return (bits >> 8 & 1) != 0; }
  size_t value() const { return bits & 0x7fffffff; }
};

class PrecompiledNormalizer : public Normalizer {
 public:
  PrecompiledNormalizer(std::string_view map, std::string where) : where_(std::move(where)) {
    const auto bytes = from_base64(map);
    uint32_t size = 0;
    if (!bytes || bytes->size() < sizeof(size)) refuse_map();
    std::memcpy(&size, bytes->data(), sizeof(size));
    if (size < sizeof(uint32_t) || size % sizeof(uint32_t) != 0 ||
        size > bytes->size() - sizeof(size))
      refuse_map();
    units_.resize(size / sizeof(uint32_t));
    std::memcpy(units_.data(), bytes->data() + sizeof(size), size);
    texts_ = bytes->substr(sizeof(size) + size);
    if (valid_prefix(texts_) != texts_.size()) refuse_map();
  }

  bool apply(std::string_view text, Normalizing& work, std::string& out) const override {
    out.reserve(text.size());
    for (size_t at = 0; at < text.size();) {
      const size_t end = cluster_end(text, at);
      const auto whole = end - at < kShortCluster ? find(text.substr(at, end - at)) : std::nullopt;
      if (whole) {
        put(*whole, work, out);
        at = end;
        continue;
      }
      while (at < end) {
        size_t next = at;
        next_code(text, next);
        const std::string_view character = text.substr(at, next - at);
        put(find(character).value_or(character), work, out);
        at = next;
      }
    }
    return out != text;
  }
  bool moves_begin() const override { return true; }

 private:
  [[noreturn]] void refuse_map() const {
    throw Error(formatted("{}: precompiled_charsmap isn't a map of SentencePiece.", where_),
                "download the tokenizer.json again.");
  }

  void put(std::string_view text, Normalizing& work, std::string& out) const {
    work.room.take(text.size(), where_);
    out += text;
  }

  // The text of the shortest beginning of `key` that the map has.
  std::optional<std::string_view> find(std::string_view key) const {
    size_t at = units_[0].children();
    for (const char c : key) {
      const auto byte = static_cast<unsigned char>(c);
      if (byte == 0) break;
      at ^= byte;
      if (at >= units_.size() || units_[at].byte() != byte) break;
      const ArrayUnit unit = units_[at];
      at ^= unit.children();
      if (!unit.has_value()) continue;
      const size_t begin = at < units_.size() ? units_[at].value() : texts_.size();
      if (begin > texts_.size() || (begin < texts_.size() && continues(texts_[begin]))) break;
      return std::string_view(texts_).substr(begin, texts_.find('\0', begin) - begin);
    }
    return std::nullopt;
  }

  std::vector<ArrayUnit> units_;
  std::string texts_;
  std::string where_;
};

}  // namespace

std::unique_ptr<const Normalizer> precompiled_normalizer(std::string_view map, std::string where) {
  return std::make_unique<PrecompiledNormalizer>(map, std::move(where));
}

}  // namespace fsdp::data
