// Normalizers: what a tokenizer does to a text before it splits it into words.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "data/folding.h"
#include "data/pattern.h"
#include "data/text_room.h"

namespace fsdp::data {

// What normalizing one text uses.
struct Normalizing {
  Normalizing(size_t bytes, size_t steps, int threads)
      : threads(threads), room(bytes), budget(bytes, 4 * steps) {}
  int threads;
  TextRoom room;
  PatternBudget budget;
};

class Normalizer {
 public:
  virtual ~Normalizer() = default;
  // Writes the normalized text to `out`, which is empty; or returns false, if it is `text`.
  // Both are valid UTF-8.
  virtual bool apply(std::string_view text, Normalizing& work, std::string& out) const = 0;
  // Whether the first character may come from another place than the beginning.
  virtual bool moves_begin() const { return false; }
};

// `where`, here and in other steps: the file and the part of it, for errors.
std::unique_ptr<const Normalizer> nfc_normalizer(std::string where);
// Replaces characters one by one.
std::unique_ptr<const Normalizer> folding_normalizer(Folding folding, std::string where);
std::unique_ptr<const Normalizer> prepend_normalizer(std::string text, std::string where);
std::unique_ptr<const Normalizer> strip_normalizer(bool left, bool right);
// Replaces each match of a pattern, or each occurrence of a text, by `by`.
std::unique_ptr<const Normalizer> replace_normalizer(std::variant<Pattern, std::string> what,
                                                     std::string by, std::string where);

// All of them, one after the other. `storage` owns the result if it isn't `text`.
std::string_view normalized(const std::vector<std::unique_ptr<const Normalizer>>& steps,
                            std::string_view text, Normalizing& work, std::string& storage);

}  // namespace fsdp::data
