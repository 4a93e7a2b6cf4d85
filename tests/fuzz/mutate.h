// Makes new inputs from old ones: changes, moves and repeats bits, numbers, ranges and words.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::fuzz {

class Random {  // the same numbers on every machine for one seed
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next();
  size_t below(size_t limit) { return limit ? static_cast<size_t>(next() % limit) : 0; }

 private:
  uint64_t state_;
};

struct Material {
  std::vector<std::string> inputs;  // kept so far; at least one
  std::vector<std::string> words;   // from the dictionary
  size_t longest = 0;               // bytes per input
};

std::string mutate(const std::string& input, const Material& material, Random& random);

}  // namespace fsdp::fuzz
