// Model: turns a word into token ids. Immutable, so that all threads share it.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace fsdp::data {

class Model {
 public:
  // What a thread needs to encode words: working memory, and a cache of recent ones.
  class Scratch {
   public:
    virtual ~Scratch() = default;
  };

  virtual ~Model() = default;
  virtual std::unique_ptr<Scratch> scratch() const = 0;
  // Appends the ids of a word of valid UTF-8. `scratch` is from this model, and one thread's.
  virtual void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const = 0;
};

}  // namespace fsdp::data
