// Parses a tokenizer.json into checked parts. A part that we can't treat exactly as the
// `tokenizers` package does is refused by name.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/added_tokens.h"
#include "data/bpe.h"
#include "data/pattern.h"

namespace fsdp::data {

// One step of splitting text into words, applied to every piece that the previous step made.
struct WordStep {
  bool prefix_space = false;         // prepends a space to a piece that doesn't start with one
  std::shared_ptr<Pattern> pattern;  // splits a piece at every match; null: doesn't split
};

struct TokenizerParts {
  std::shared_ptr<const Bpe> bpe;
  bool nfc = false;  // normalize the text first
  std::vector<WordStep> steps;
  std::vector<AddedToken> added;
  std::vector<int32_t> before, after;  // tokens that the template puts around a text
  std::vector<std::string> pieces;     // the bytes of each id; empty for unused ids
  std::vector<bool> known;             // whether the id is used
};

// `name`: the file, for errors.
TokenizerParts parse_tokenizer(const std::string& json, const std::string& name);

}  // namespace fsdp::data
