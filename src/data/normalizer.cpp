#include "data/normalizer.h"

#include <algorithm>

#include "data/nfc.h"
#include "data/replace.h"
#include "data/text_parts.h"
#include "data/unicode.h"

namespace fsdp::data {
namespace {

class NfcNormalizer : public Normalizer {
 public:
  explicit NfcNormalizer(std::string where) : where_(std::move(where)) {}

  bool apply(std::string_view text, Normalizing& work, std::string& out) const override {
    const auto ascii = [](char c) { return static_cast<unsigned char>(c) < 0x80; };
    auto parts = parts_of(text, size_t{1} << 20, ascii);
    if (all_parts(parts, work.threads, surely_nfc)) return false;
    std::vector<std::string> results(parts.size());
    for_each_index(parts.size(), work.threads, [&](size_t i) { results[i] = nfc(parts[i]); });
    for (const auto& result : results) out += result;
    work.room.take(out.size(), where_);
    return true;
  }

 private:
  std::string where_;
};

class FoldingNormalizer : public Normalizer {
 public:
  FoldingNormalizer(Folding folding, std::string where)
      : folding_(std::move(folding)), where_(std::move(where)) {}

  bool apply(std::string_view text, Normalizing& work, std::string& out) const override {
    const auto anywhere = [](char c) { return !continues(c); };
    auto parts = parts_of(text, size_t{1} << 20, anywhere);
    std::vector<std::string> results(parts.size());
    std::vector<char> changed(parts.size());
    for_each_index(parts.size(), work.threads,
                   [&](size_t i) { changed[i] = folding_.apply(parts[i], results[i]); });
    if (std::find(changed.begin(), changed.end(), char{true}) == changed.end()) return false;
    for (size_t i = 0; i < parts.size(); ++i) out += changed[i] ? results[i] : parts[i];
    work.room.take(out.size(), where_);
    return true;
  }

 private:
  Folding folding_;
  std::string where_;
};

class PrependNormalizer : public Normalizer {
 public:
  PrependNormalizer(std::string text, std::string where)
      : text_(std::move(text)), where_(std::move(where)) {}

  bool apply(std::string_view text, Normalizing& work, std::string& out) const override {
    if (text.empty()) return false;
    work.room.take(text_.size() + text.size(), where_);
    out.append(text_).append(text);
    return true;
  }

 private:
  std::string text_, where_;
};

class StripNormalizer : public Normalizer {
 public:
  StripNormalizer(bool left, bool right) : left_(left), right_(right) {}

  bool apply(std::string_view text, Normalizing&, std::string& out) const override {
    const std::string_view whole = text;
    if (left_) {
      for (size_t at = 0; !text.empty() && is_space(next_code(text, at)); at = 0)
        text.remove_prefix(at);
    }
    while (right_ && !text.empty()) {
      size_t begin = text.size() - 1;
      while (continues(text[begin])) --begin;
      size_t at = begin;
      if (!is_space(next_code(text, at))) break;
      text = text.substr(0, begin);
    }
    out.append(text);
    return text.size() < whole.size();
  }
  bool moves_begin() const override { return left_; }

 private:
  bool left_, right_;
};

class ReplaceNormalizer : public Normalizer {
 public:
  explicit ReplaceNormalizer(Replace replace) : replace_(std::move(replace)) {}

  bool apply(std::string_view text, Normalizing& work, std::string& out) const override {
    return replace_.apply(text, work.budget, work.room, out);
  }
  bool moves_begin() const override { return replace_.moves_begin(); }

 private:
  Replace replace_;
};

}  // namespace

std::unique_ptr<const Normalizer> nfc_normalizer(std::string where) {
  return std::make_unique<NfcNormalizer>(std::move(where));
}

std::unique_ptr<const Normalizer> folding_normalizer(Folding folding, std::string where) {
  return std::make_unique<FoldingNormalizer>(std::move(folding), std::move(where));
}

std::unique_ptr<const Normalizer> prepend_normalizer(std::string text, std::string where) {
  return std::make_unique<PrependNormalizer>(std::move(text), std::move(where));
}

std::unique_ptr<const Normalizer> strip_normalizer(bool left, bool right) {
  return std::make_unique<StripNormalizer>(left, right);
}

std::unique_ptr<const Normalizer> replace_normalizer(std::variant<Pattern, std::string> what,
                                                     std::string by, std::string where) {
  return std::make_unique<ReplaceNormalizer>(
      Replace(std::move(what), std::move(by), std::move(where)));
}

std::string_view normalized(const std::vector<std::unique_ptr<const Normalizer>>& steps,
                            std::string_view text, Normalizing& work, std::string& storage) {
  std::string next;
  for (const auto& step : steps) {
    next.clear();
    if (!step->apply(text, work, next)) continue;
    storage.swap(next);
    text = storage;
  }
  return text;
}

}  // namespace fsdp::data
