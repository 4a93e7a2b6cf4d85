// Spelling: how BPE spells a word before it merges anything: by bytes, or by characters.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace fsdp::data {

// Byte-level vocabularies spell each byte as a printable character; a space, for example, is
// U+0120. Returns the bytes that `token` spells, or `token` itself if it has any other character.
std::string bytes_of_token(std::string_view token);
std::string token_of_byte(unsigned char byte);

// The byte that a token such as <0x0A> stands for, or -1.
int byte_of_token(std::string_view token);
// The tokens <0x00> to <0xFF> of a vocabulary; -1 for those that it doesn't have.
std::array<int32_t, 256> byte_tokens(const std::unordered_map<std::string, int32_t>& vocabulary);

class Spelling {
 public:
  virtual ~Spelling() = default;
  // Appends the first symbols of a word, at most one per byte.
  virtual void spell(std::string_view word, std::vector<int32_t>& symbols) const = 0;
};

// `ids`: the token of each byte, or -1 if the vocabulary has none; such bytes are dropped, as in
// the `tokenizers` package.
std::unique_ptr<const Spelling> spelling_by_bytes(const std::array<int32_t, 256>& ids);

struct CharacterRules {
  bool byte_fallback = false;  // spells a character without a token by its bytes' <0x..>
  int32_t unknown = -1;        // the token of what has no other; -1: it is dropped
  bool fuse_unknown = false;   // one such token for neighbours
};
// Characters that are tokens of the vocabulary, as in models made by SentencePiece.
std::unique_ptr<const Spelling> spelling_by_characters(
    const std::unordered_map<std::string, int32_t>& vocabulary, CharacterRules rules);

}  // namespace fsdp::data
