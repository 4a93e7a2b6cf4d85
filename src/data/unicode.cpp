// Runs are expanded once into blocks of 256 characters, so that a category takes two array reads.
#include "data/unicode.h"

#include <array>
#include <cstring>
#include <map>
#include <vector>

namespace fsdp::data {
namespace {

constexpr const char* kNames =
    "CnLuLlLtLmLoMnMcMeNdNlNoPcPdPsPePiPfPoSmScSkSoZsZlZpCcCfCo";  // as in Category

struct Blocks {
  std::array<uint16_t, 0x1100> index;                // the block, by a character's upper bits
  std::vector<std::array<uint8_t, 256>> categories;  // equal blocks are stored once

  Blocks() {
    std::map<std::array<uint8_t, 256>, uint16_t> known;
    int run = 0;
    for (uint32_t block = 0; block < index.size(); ++block) {
      std::array<uint8_t, 256> content;
      for (uint32_t i = 0; i < 256; ++i) {
        while (run + 1 < kCategoryRunCount && (kCategoryRuns[run + 1] >> 5) <= block * 256 + i)
          ++run;
        content[i] = kCategoryRuns[run] & 31;
      }
      auto [at, is_new] = known.emplace(content, static_cast<uint16_t>(categories.size()));
      if (is_new) categories.push_back(content);
      index[block] = at->second;
    }
  }
};

const Blocks& blocks() {
  static const Blocks blocks;
  return blocks;
}

}  // namespace

uint32_t category_mask(std::string_view name) {
  uint32_t mask = 0;
  for (int i = 0; kNames[2 * i]; ++i) {
    std::string_view here(kNames + 2 * i, 2);
    if (name == here || (name.size() == 1 && name[0] == here[0])) mask |= uint32_t{1} << i;
  }
  return mask;
}

Category category(char32_t code) {
  static const Blocks& table = blocks();
  if (code > 0x10ffff) return Category::Cn;
  return static_cast<Category>(table.categories[table.index[code >> 8]][code & 255]);
}

bool is_space(char32_t code) {
  if (code < 0x80) return code == ' ' || (code >= 9 && code <= 13);
  static const uint32_t separators = category_mask("Z");
  return code == 0x85 || (separators & bit(category(code)));
}

bool is_word(char32_t code) {
  static const uint32_t word = category_mask("L") | category_mask("M") | category_mask("Nd") |
                               category_mask("Nl") | bit(Category::Pc);
  if (word & bit(category(code))) return true;
  // Joiners, and circled and squared letters: symbols that count as alphabetic.
  return code == 0x200c || code == 0x200d || (code >= 0x24b6 && code <= 0x24e9) ||
         (code >= 0x1f130 && code <= 0x1f149) || (code >= 0x1f150 && code <= 0x1f169) ||
         (code >= 0x1f170 && code <= 0x1f189);
}

void append_utf8(std::string& out, char32_t code) {
  auto put = [&](char32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code < 0x80) return put(code);
  if (code < 0x800) return put(0xc0 | code >> 6), put(0x80 | (code & 0x3f));
  if (code < 0x10000) {
    return put(0xe0 | code >> 12), put(0x80 | (code >> 6 & 0x3f)), put(0x80 | (code & 0x3f));
  }
  put(0xf0 | code >> 18), put(0x80 | (code >> 12 & 0x3f)), put(0x80 | (code >> 6 & 0x3f)),
      put(0x80 | (code & 0x3f));
}

Utf8Step utf8_step(std::string_view text, size_t at) {
  auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  unsigned char lead = byte(at);
  if (lead < 0x80) return {1, true, false};
  if (lead < 0xc2 || lead > 0xf4) return {1, false, false};
  int length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  // The second byte excludes overlong forms, surrogates and codes beyond Unicode.
  unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  for (int i = 1; i < length; ++i) {
    if (at + i >= text.size()) return {i, false, true};
    if (byte(at + i) < low || byte(at + i) > high) return {i, false, false};
    low = 0x80, high = 0xbf;
  }
  return {length, true, false};
}

size_t valid_prefix(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    uint64_t eight;
    if (at + 8 <= text.size()) {
      std::memcpy(&eight, text.data() + at, 8);
      if (!(eight & 0x8080808080808080ull)) {
        at += 8;
        continue;
      }
    }
    Utf8Step step = utf8_step(text, at);
    if (!step.valid) break;
    at += step.length;
  }
  return at;
}

std::string repaired(std::string_view text) {
  std::string out;
  out.reserve(text.size() + 16);
  while (true) {
    size_t good = valid_prefix(text);
    out.append(text.substr(0, good));
    text.remove_prefix(good);
    if (text.empty()) return out;
    text.remove_prefix(utf8_step(text, 0).length);
    out.append("\xef\xbf\xbd");
  }
}

}  // namespace fsdp::data
