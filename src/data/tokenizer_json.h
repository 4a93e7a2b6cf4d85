// Reading a tokenizer.json: its parts, checked, in the form in which we use them. A part that we
// would treat in another way than the `tokenizers` package is refused by its name.
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

// One step of cutting text into words. It is done to every piece that the step before made.
struct WordStep {
  bool prefix_space = false;         // puts a space before a piece that has none
  std::shared_ptr<Pattern> pattern;  // cuts it at every match; null: leaves it whole
};

struct TokenizerParts {
  std::shared_ptr<const Bpe> bpe;
  bool nfc = false;  // the text is normalised first
  std::vector<WordStep> steps;
  std::vector<AddedToken> added;
  std::vector<int32_t> before, after;  // what the template puts around a text
  std::vector<std::string> pieces;     // the bytes of each id; empty where there is no such id
  std::vector<bool> known;             // whether there is
};

// `name` is the file, for errors.
TokenizerParts parse_tokenizer(const std::string& json, const std::string& name);

}  // namespace fsdp::data
