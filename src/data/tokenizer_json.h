// Parses a tokenizer.json into checked parts. A part that we can't treat exactly as the
// `tokenizers` package does is refused by name.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/added_tokens.h"
#include "data/decoder.h"
#include "data/model.h"
#include "data/normalizer.h"
#include "data/pre_tokenizer.h"

namespace fsdp::data {

struct TokenizerParts {
  std::vector<std::unique_ptr<const Normalizer>> normalizers;
  std::vector<WordStep> steps;
  bool byte_level = false;  // the model gets bytes instead of characters
  std::unique_ptr<const Model> model;
  std::vector<AddedToken> added;
  std::vector<int32_t> before, after;  // tokens that the template puts around a text
  // By id, as the file spells them, and added tokens as they are searched for: normalized. Empty
  // for unused ids.
  std::vector<std::string> tokens;
  std::vector<std::string> pieces;  // the bytes that each adds in the middle of a text
  std::vector<bool> known;          // whether the id is used
  DecodeSteps decoder;              // empty if the pieces are the text
};

// `name`: the file, for errors.
TokenizerParts parse_tokenizer(const std::string& json, const std::string& name);

}  // namespace fsdp::data
