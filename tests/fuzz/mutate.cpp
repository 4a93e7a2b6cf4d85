#include "fuzz/mutate.h"

#include <algorithm>

#include "fuzz/coverage.h"

namespace fsdp::fuzz {
namespace {

// Values at which lengths, counts and offsets go wrong.
constexpr uint64_t kNumbers[] = {0,
                                 1,
                                 2,
                                 16,
                                 63,
                                 64,
                                 100,
                                 127,
                                 128,
                                 255,
                                 256,
                                 1024,
                                 4096,
                                 32767,
                                 32768,
                                 65535,
                                 65536,
                                 (uint64_t{1} << 31) - 1,
                                 uint64_t{1} << 31,
                                 (uint64_t{1} << 32) - 1,
                                 uint64_t{1} << 32,
                                 uint64_t{1} << 62,
                                 (uint64_t{1} << 63) - 1,
                                 uint64_t{1} << 63,
                                 ~uint64_t{0} - 1,
                                 ~uint64_t{0}};

constexpr const char* kDigits[] = {"0",
                                   "-1",
                                   "1",
                                   "-0",
                                   "00",
                                   "255",
                                   "65536",
                                   "1e9",
                                   "1e999",
                                   "0.5",
                                   "2147483647",
                                   "4294967296",
                                   "16777215",
                                   "9223372036854775807",
                                   "-9223372036854775808",
                                   "18446744073709551615",
                                   "18446744073709551616",
                                   "NaN",
                                   "true"};

struct Mutation {
  std::string bytes;
  const Material& material;
  Random& random;

  size_t place() { return random.below(bytes.size() + 1); }  // between bytes
  size_t length(size_t at) {                                 // of a range; mostly short
    const size_t most = std::min<size_t>(bytes.size() - at, size_t{1} << random.below(11));
    return random.below(most + 1);
  }

  void flip() {
    if (bytes.empty()) return;
    char& c = bytes[random.below(bytes.size())];
    c = static_cast<char>(c ^ 1 << random.below(8));
  }

  void set_byte() {
    if (!bytes.empty()) bytes[random.below(bytes.size())] = static_cast<char>(random.next());
  }

  void write_number(uint64_t value, size_t width, size_t at, bool big_endian) {
    for (size_t i = 0; i < width; ++i)
      bytes[at + (big_endian ? width - 1 - i : i)] = static_cast<char>(value >> (8 * i));
  }

  void set_number() {
    const size_t width = size_t{1} << random.below(4);
    if (bytes.size() < width) return;
    const size_t at = random.below(bytes.size() - width + 1);
    write_number(kNumbers[random.below(std::size(kNumbers))], width, at, random.below(4) == 0);
  }

  void add_number() {
    const size_t width = size_t{1} << random.below(4);
    if (bytes.size() < width) return;
    const size_t at = random.below(bytes.size() - width + 1);
    uint64_t value = 0;
    for (size_t i = width; i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[at + i]);
    write_number(value + random.below(33) - 16, width, at, false);
  }

  void set_digits() {
    if (bytes.empty()) return;
    const auto digit = [](char c) { return c >= '0' && c <= '9'; };
    const auto found =
        std::find_if(bytes.begin() + static_cast<std::ptrdiff_t>(random.below(bytes.size())),
                     bytes.end(), digit);
    if (found == bytes.end()) return;
    const auto end = std::find_if_not(found, bytes.end(), digit);
    bytes.replace(found, end, kDigits[random.below(std::size(kDigits))]);
  }

  void erase() {
    const size_t at = place();
    bytes.erase(at, length(at));
  }

  void insert_bytes() {
    std::string fresh(1 + random.below(16), static_cast<char>(random.next()));
    if (random.below(2) == 0)
      for (char& c : fresh) c = static_cast<char>(random.next());
    bytes.insert(place(), fresh);
  }

  void copy() {  // copies a range elsewhere, overwriting or inserting
    const size_t at = place();
    put(bytes.substr(at, length(at)));
  }

  void repeat() {
    const size_t at = place();
    const std::string stretch = bytes.substr(at, 1 + random.below(8));
    std::string all;
    for (size_t n = size_t{1} << random.below(12); n > 0 && all.size() < material.longest; --n)
      all += stretch;
    bytes.insert(at, all);
  }

  void splice() {
    const std::string& other = material.inputs[random.below(material.inputs.size())];
    const size_t from = random.below(other.size() + 1);
    if (random.below(2) == 0)
      bytes = bytes.substr(0, place()) + other.substr(from);
    else
      put(other.substr(from, random.below(std::min<size_t>(other.size() - from, 256) + 1)));
  }

  void use_word() {
    if (!material.words.empty()) put(material.words[random.below(material.words.size())]);
  }

  // Finds a number that was compared with another, and puts the other in its place.
  void use_comparison() {
    for (int tries = 0; tries < 8; ++tries) {
      const Comparison pair = recent_comparison(random.next());
      std::string left, right;
      for (int i = 0; i < pair.bytes; ++i) {
        left += static_cast<char>(pair.left >> (8 * i));
        right += static_cast<char>(pair.right >> (8 * i));
      }
      size_t at =
          left.empty() ? std::string::npos : bytes.find(left, random.below(bytes.size() + 1));
      if (at == std::string::npos && !left.empty()) at = bytes.find(left);
      if (at == std::string::npos) continue;
      bytes.replace(at, left.size(), right);
      return;
    }
  }

  void put(const std::string& stretch) {
    const size_t at = place();
    bytes.replace(at, random.below(2) == 0 ? 0 : std::min(stretch.size(), bytes.size() - at),
                  stretch);
  }

  void once() {
    constexpr void (Mutation::*kAll[])() = {
        &Mutation::flip,           &Mutation::set_byte,  &Mutation::set_number,
        &Mutation::add_number,     &Mutation::erase,     &Mutation::insert_bytes,
        &Mutation::copy,           &Mutation::repeat,    &Mutation::splice,
        &Mutation::use_word,       &Mutation::use_word,  &Mutation::use_comparison,
        &Mutation::use_comparison, &Mutation::set_digits};
    (this->*kAll[random.below(std::size(kAll))])();
    if (bytes.size() > material.longest) bytes.resize(material.longest);
  }
};

}  // namespace

uint64_t Random::next() {  // splitmix64
  uint64_t value = state_ += 0x9e3779b97f4a7c15u;
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
  value = (value ^ value >> 27) * 0x94d049bb133111ebu;
  return value ^ value >> 31;
}

std::string mutate(const std::string& input, const Material& material, Random& random) {
  Mutation mutation{input, material, random};
  for (size_t times = size_t{1} << random.below(5); times > 0; --times) mutation.once();
  return std::move(mutation.bytes);
}

}  // namespace fsdp::fuzz
