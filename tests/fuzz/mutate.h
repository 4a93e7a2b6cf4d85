// New inputs from old ones: bits, numbers, stretches and words are changed, moved and repeated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::fuzz {

class Random {  // the same numbers everywhere for the same seed
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next();
  size_t below(size_t limit) { return limit ? static_cast<size_t>(next() % limit) : 0; }

 private:
  uint64_t state_;
};

struct Material {
  std::vector<std::string> inputs;  // kept: there is at least one
  std::vector<std::string> words;   // of the dictionary
  size_t longest = 0;               // bytes of an input
};

std::string mutate(const std::string& input, const Material& material, Random& random);

}  // namespace fsdp::fuzz
