// TextRoom: how much text the steps of a tokenizer may make of a text. A step that replaces a
// character by many, used again and again, would fill the memory otherwise.
#pragma once

#include <cstdint>
#include <string>

namespace fsdp::data {

class TextRoom {
 public:
  static constexpr int64_t kPerByte = 100;  // all steps together; real tokenizers make 1 to 6
  static constexpr size_t kLongest = 1000;  // bytes that a step puts in one place

  explicit TextRoom(size_t bytes) : left_(10'000 + kPerByte * static_cast<int64_t>(bytes)) {}

  // Throws Error if there isn't room for so much more. `where`: the file and the part of it.
  void take(size_t bytes, const std::string& where) {
    left_ -= static_cast<int64_t>(bytes);
    if (left_ < 0) refuse(where);
  }

 private:
  [[noreturn]] static void refuse(const std::string& where);

  int64_t left_;
};

}  // namespace fsdp::data
