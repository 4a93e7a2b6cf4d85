// Precompiled: SentencePiece's map of texts, which its tokenizers normalize with (T5, XLM-R and
// others).
//
// The map is a double array of bytes and texts that end in a zero byte. A step replaces each
// grapheme cluster of fewer than six bytes by the text of its shortest beginning that the map has,
// else each character by its own. The package does so, and models were trained on it.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "data/normalizer.h"

namespace fsdp::data {

// `map`: base64, as in tokenizer.json. An Error if it isn't one.
std::unique_ptr<const Normalizer> precompiled_normalizer(std::string_view map, std::string where);

}  // namespace fsdp::data
