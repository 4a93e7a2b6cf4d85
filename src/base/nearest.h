// The word that was probably meant, for errors about words that nobody knows.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/namespace.h"

namespace fsdp::base {

// Letters to insert, delete, replace or swap with the next one.
size_t edits(const std::string& from, const std::string& to);
// The largest number of edits of a likely typo.
size_t likely_typo(const std::string& word);
// The closest of `known`; "" if none is close.
std::string nearest_word(const std::vector<std::string>& known, const std::string& word);

}  // namespace fsdp::base
