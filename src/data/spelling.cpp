#include "data/spelling.h"

#include "data/unicode.h"

namespace fsdp::data {
namespace {

// The character that spells a byte: the byte itself if it is printable, otherwise the next unused
// one from 256 on.
struct ByteAlphabet {
  std::array<char32_t, 256> of_byte;
  std::unordered_map<char32_t, unsigned char> byte_of;

  ByteAlphabet() {
    char32_t free = 256;
    for (char32_t byte = 0; byte < 256; ++byte) {
      bool seen = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
      of_byte[byte] = seen ? byte : free++;
      byte_of[of_byte[byte]] = static_cast<unsigned char>(byte);
    }
  }
};

const ByteAlphabet& byte_alphabet() {
  static const ByteAlphabet alphabet;
  return alphabet;
}

int hexadecimal_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char lower = static_cast<char>(c | 0x20);
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

class ByteSpelling : public Spelling {
 public:
  explicit ByteSpelling(const std::array<int32_t, 256>& ids) : ids_(ids) {}

  void spell(std::string_view word, std::vector<int32_t>& symbols) const override {
    size_t count = symbols.size();
    symbols.resize(count + word.size());
    for (unsigned char byte : word) {
      if (ids_[byte] >= 0) symbols[count++] = ids_[byte];
    }
    symbols.resize(count);
  }

 private:
  std::array<int32_t, 256> ids_;
};

class CharacterSpelling : public Spelling {
 public:
  CharacterSpelling(const std::unordered_map<std::string, int32_t>& vocabulary,
                    CharacterRules rules)
      : rules_(rules), bytes_(byte_tokens(vocabulary)) {
    low_.fill(-1);
    for (const auto& [token, id] : vocabulary) {
      if (token.empty() || utf8_step(token, 0).length != static_cast<int>(token.size())) continue;
      size_t at = 0;
      const char32_t code = next_code(token, at);
      (code < low_.size() ? low_[code] : high_[code]) = id;
    }
  }

  void spell(std::string_view word, std::vector<int32_t>& symbols) const override {
    bool unknown = false;  // one that isn't among the symbols yet
    for (size_t at = 0; at < word.size();) {
      const size_t begin = at;
      const int32_t id = of(next_code(word, at));
      if (id >= 0) {
        if (unknown) symbols.push_back(rules_.unknown);
        unknown = false;
        symbols.push_back(id);
        continue;
      }
      // The package keeps an unknown one waiting while it spells bytes; ids depend on it.
      if (rules_.byte_fallback && spell_bytes(word.substr(begin, at - begin), symbols)) continue;
      if (rules_.unknown < 0) continue;
      if (unknown && !rules_.fuse_unknown) symbols.push_back(rules_.unknown);
      unknown = true;
    }
    if (unknown) symbols.push_back(rules_.unknown);
  }

 private:
  int32_t of(char32_t code) const {
    if (code < low_.size()) return low_[code];
    auto found = high_.find(code);
    return found == high_.end() ? -1 : found->second;
  }

  bool spell_bytes(std::string_view character, std::vector<int32_t>& symbols) const {
    for (unsigned char byte : character) {
      if (bytes_[byte] < 0) return false;
    }
    for (unsigned char byte : character) symbols.push_back(bytes_[byte]);
    return true;
  }

  CharacterRules rules_;
  std::array<int32_t, 256> bytes_;
  std::array<int32_t, 128> low_;
  std::unordered_map<char32_t, int32_t> high_;
};

}  // namespace

std::string bytes_of_token(std::string_view token) {
  std::string bytes;
  for (size_t at = 0; at < token.size();) {
    auto found = byte_alphabet().byte_of.find(next_code(token, at));
    if (found == byte_alphabet().byte_of.end()) return std::string(token);
    bytes.push_back(static_cast<char>(found->second));
  }
  return bytes;
}

std::string token_of_byte(unsigned char byte) {
  std::string token;
  append_utf8(token, byte_alphabet().of_byte[byte]);
  return token;
}

int byte_of_token(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  const int high = token[3] == '+' ? 0 : hexadecimal_digit(token[3]);  // the package reads +A, too
  const int low = hexadecimal_digit(token[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

std::array<int32_t, 256> byte_tokens(const std::unordered_map<std::string, int32_t>& vocabulary) {
  constexpr const char* kDigits = "0123456789ABCDEF";
  std::array<int32_t, 256> ids;
  for (int byte = 0; byte < 256; ++byte) {
    auto found = vocabulary.find({'<', '0', 'x', kDigits[byte / 16], kDigits[byte % 16], '>'});
    ids[byte] = found == vocabulary.end() ? -1 : found->second;
  }
  return ids;
}

std::unique_ptr<const Spelling> spelling_by_bytes(const std::array<int32_t, 256>& ids) {
  return std::make_unique<ByteSpelling>(ids);
}

std::unique_ptr<const Spelling> spelling_by_characters(
    const std::unordered_map<std::string, int32_t>& vocabulary, CharacterRules rules) {
  return std::make_unique<CharacterSpelling>(vocabulary, rules);
}

}  // namespace fsdp::data
