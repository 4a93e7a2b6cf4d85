// Decoders: the steps that make a text of tokens. Byte-level tokens need none: their bytes are the
// text.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "data/pattern.h"
#include "data/text_room.h"

namespace fsdp::data {

// What decoding some tokens uses.
struct Decoding {
  Decoding(size_t bytes, size_t steps) : room(bytes), budget(bytes, 4 * steps) {}
  TextRoom room;
  PatternBudget budget;
};

class DecodeStep {
 public:
  virtual ~DecodeStep() = default;
  // Changes tokens, or joins some. They are valid UTF-8.
  virtual void apply(std::vector<std::string>& tokens, Decoding& work) const = 0;
  virtual bool reads_bytes() const { return false; }  // joins <0x..> to characters
};

std::unique_ptr<const DecodeStep> replace_decoder(std::variant<Pattern, std::string> what,
                                                  std::string by, std::string where);
std::unique_ptr<const DecodeStep> byte_fallback_decoder();
std::unique_ptr<const DecodeStep> fuse_decoder();
// Drops up to `start` times `content` at the beginning of each token, and `stop` times at its end.
std::unique_ptr<const DecodeStep> strip_decoder(char32_t content, size_t start, size_t stop);
// `dropped_first`: the first token's replacements aren't spaces.
std::unique_ptr<const DecodeStep> metaspace_decoder(std::string replacement, bool dropped_first);

using DecodeSteps = std::vector<std::unique_ptr<const DecodeStep>>;

// The text of some tokens. A run of <0x..> that isn't UTF-8 becomes one U+FFFD each.
std::string decoded(const DecodeSteps& steps, std::vector<std::string> tokens);
// The bytes that a token adds in the middle of a text.
std::string decoded_piece(const DecodeSteps& steps, const std::string& token);

}  // namespace fsdp::data
