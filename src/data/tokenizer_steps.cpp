// Reads the steps of a tokenizer.json: normalizers, pre-tokenizers and decoders.
#include <cctype>
#include <map>

#include "base/format.h"
#include "data/precompiled.h"
#include "data/tokenizer_reader.h"
#include "data/unicode.h"

namespace fsdp::data {
namespace {

constexpr size_t kMostSteps = 64;  // of each kind; one of splitting is a level of recursion

// ByteLevel's own pattern, used unless use_regex is false.
constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
// Digits, by a newer version of Unicode than that of patterns.
constexpr const char* kNumeric = R"([\p{N}\x{11de0}-\x{11de9}\x{16ff4}-\x{16ff6}])";
// What \w is in the pattern of the pre-tokenizer Whitespace; is_word() has the same.
constexpr const char* kWord =
    R"(\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}\x{200c}\x{200d}\x{24b6}-\x{24e9}\x{1f130}-\x{1f149})"
    R"(\x{1f150}-\x{1f169}\x{1f170}-\x{1f189})";

// A pattern for the text itself.
std::string escaped_pattern(std::string_view text) {
  std::string pattern;
  for (const char c : text) {
    const bool plain = static_cast<unsigned char>(c) >= 0x80 || std::isalnum(c) || c == ' ' ||
                       static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
    if (!plain) pattern += '\\';
    pattern += c;
  }
  return pattern;
}

}  // namespace

void TokenizerReader::read_normalizer(const Json& part, const std::string& where) {
  const std::string type = type_of(part, where);
  if (parts.normalizers.size() >= kMostSteps) refuse(where, "has too many steps");
  auto& steps = parts.normalizers;
  if (type == "Sequence") {
    for (const Json& inner : required(part, "normalizers", Json::value_t::array, where))
      read_normalizer(inner, where + ".normalizers");
  } else if (type == "NFC") {
    steps.push_back(nfc_normalizer(at(where)));
  } else if (type == "NFKC") {
    steps.push_back(folding_normalizer(Folding::compatible(), at(where)));
    steps.push_back(nfc_normalizer(at(where)));
  } else if (type == "Lowercase") {
    steps.push_back(folding_normalizer(Folding::lowercase(), at(where)));
  } else if (type == "Prepend") {
    steps.push_back(prepend_normalizer(inserted(part, "prepend", where), at(where)));
  } else if (type == "Replace") {
    steps.push_back(
        replace_normalizer(pattern_of(part, where), inserted(part, "content", where), at(where)));
  } else if (type == "Strip") {
    const bool left = required(part, "strip_left", Json::value_t::boolean, where).get<bool>();
    const bool right = required(part, "strip_right", Json::value_t::boolean, where).get<bool>();
    steps.push_back(strip_normalizer(left, right));
  } else if (type == "Precompiled") {
    const Json& map = required(part, "precompiled_charsmap", Json::value_t::string, where);
    steps.push_back(precompiled_normalizer(map.get_ref<const std::string&>(), at(where)));
  } else {
    refuse(where, formatted("type {} isn't supported (Lowercase, NFC, NFKC, Precompiled, Prepend, "
                            "Replace and Strip are)",
                            type));
  }
}

void TokenizerReader::add_step(WordStep step, const std::string& where) {
  if (parts.steps.size() >= kMostSteps) refuse(where, "has too many steps");
  if (parts.byte_level) refuse(where, "a step follows ByteLevel");
  parts.steps.push_back(std::move(step));
}

void TokenizerReader::read_split(const Json& part, const std::string& where) {
  const auto what = pattern_of(part, where);
  const auto* text = std::get_if<std::string>(&what);
  Pattern pattern = text ? compile(escaped_pattern(*text), where) : std::get<Pattern>(what);
  add_split(part, std::move(pattern), where);
}

void TokenizerReader::add_split(const Json& part, Pattern pattern, const std::string& where) {
  const bool invert = member(part, "invert", false, where);
  static const std::map<std::string, std::pair<Cut, Cut>> behaviors = {
      // as it is, and inverted: then the text between matches counts as the match
      {"Removed", {Cut::kDropMatches, Cut::kKeepMatches}},
      {"Isolated", {Cut::kIsolated, Cut::kIsolated}},
      {"MergedWithPrevious", {Cut::kAfter, Cut::kBefore}},
      {"MergedWithNext", {Cut::kBefore, Cut::kAfter}},
      {"Contiguous", {Cut::kRuns, Cut::kRuns}}};
  const auto behavior = member(part, "behavior", std::string(), where);
  const auto found = behaviors.find(behavior);
  if (found == behaviors.end())
    refuse(formatted("{}.behavior", where), formatted("{} isn't supported", behavior));
  const Cut cut = invert ? found->second.second : found->second.first;
  add_step({nullptr, std::make_shared<Splitter>(std::move(pattern), cut)}, where);
}

PrependScheme TokenizerReader::prepend_scheme(const Json& part, const std::string& where) const {
  const auto scheme = member(part, "prepend_scheme", std::string("always"), where);
  if (scheme != "always" && scheme != "first" && scheme != "never")
    refuse(formatted("{}.prepend_scheme", where), formatted("{} isn't supported", scheme));
  if (!member(part, "add_prefix_space", true, where) && scheme != "never")
    refuse(formatted("{}.add_prefix_space", where), "contradicts prepend_scheme");
  if (scheme == "never") return PrependScheme::kNever;
  return scheme == "first" ? PrependScheme::kFirst : PrependScheme::kAlways;
}

void TokenizerReader::read_metaspace(const Json& part, const std::string& where) {
  const auto replacement = inserted(part, "replacement", where);
  if (replacement.empty() ||
      utf8_step(replacement, 0).length != static_cast<int>(replacement.size()))
    refuse(formatted("{}.replacement", where), "isn't one character");
  WordStep step;
  const auto scheme = prepend_scheme(part, where);
  first_only = first_only || scheme == PrependScheme::kFirst;
  step.rewriter = metaspace(replacement, scheme);
  if (member(part, "split", true, where)) {
    step.splitter =
        std::make_shared<Splitter>(compile(escaped_pattern(replacement), where), Cut::kBefore);
  }
  add_step(std::move(step), where);
}

void TokenizerReader::read_pre_tokenizer(const Json& part, const std::string& where) {
  const std::string type = type_of(part, where);
  const auto split = [&](const std::string& pattern, Cut cut) {
    add_step({nullptr, std::make_shared<Splitter>(compile(pattern, where), cut)}, where);
  };
  if (type == "Sequence") {
    for (const Json& inner : required(part, "pretokenizers", Json::value_t::array, where))
      read_pre_tokenizer(inner, where + ".pretokenizers");
  } else if (type == "Split") {
    read_split(part, where);
  } else if (type == "Metaspace") {
    read_metaspace(part, where);
  } else if (type == "Digits") {
    const bool each =
        required(part, "individual_digits", Json::value_t::boolean, where).get<bool>();
    split(kNumeric, each ? Cut::kIsolated : Cut::kRuns);
  } else if (type == "Punctuation") {
    add_split(part, compile(formatted("[{}]", punctuation_class()), where), where);
  } else if (type == "Whitespace") {
    split(formatted("[{}]+|[^{}\\s]+", kWord, kWord), Cut::kKeepMatches);
  } else if (type == "WhitespaceSplit") {
    split("\\s", Cut::kDropMatches);
  } else if (type == "ByteLevel") {  // the last step: it turns words into bytes
    WordStep step;
    if (member(part, "add_prefix_space", true, where)) step.rewriter = space_in_front();
    if (member(part, "use_regex", true, where)) {
      step.splitter = std::make_shared<Splitter>(compile(kGpt2Pattern, where), Cut::kIsolated);
    }
    add_step(std::move(step), where);
    parts.byte_level = true;
  } else {
    refuse(where,
           formatted("type {} isn't supported (ByteLevel, Digits, Metaspace, Punctuation, Split, "
                     "Whitespace and WhitespaceSplit are)",
                     type));
  }
}

void TokenizerReader::read_strip_decoder(const Json& part, const std::string& where) {
  const auto content = inserted(part, "content", where);
  if (content.empty() || utf8_step(content, 0).length != static_cast<int>(content.size()))
    refuse(formatted("{}.content", where), "isn't one character");
  const auto count = [&](const char* key) {
    return required(part, key, Json::value_t::number_unsigned, where).get<size_t>();
  };
  size_t at = 0;
  const size_t start = count("start"), stop = count("stop");
  parts.decoder.push_back(strip_decoder(next_code(content, at), start, stop));
}

void TokenizerReader::read_decoder(const Json& part, const std::string& where) {
  const std::string type = type_of(part, where);
  if (parts.decoder.size() >= kMostSteps) refuse(where, "has too many steps");
  if (type == "Sequence") {
    for (const Json& inner : required(part, "decoders", Json::value_t::array, where))
      read_decoder(inner, where + ".decoders");
    return;
  }
  if (parts.byte_level || type == "ByteLevel") {
    if (!parts.byte_level) refuse(where, "type ByteLevel needs the pre-tokenizer ByteLevel");
    if (type != "ByteLevel")
      refuse(where, formatted("type {} isn't supported for bytes (ByteLevel is)", type));
  } else if (type == "Replace") {
    parts.decoder.push_back(
        replace_decoder(pattern_of(part, where), inserted(part, "content", where), at(where)));
  } else if (type == "ByteFallback") {
    parts.decoder.push_back(byte_fallback_decoder());
  } else if (type == "Fuse") {
    parts.decoder.push_back(fuse_decoder());
  } else if (type == "Strip") {
    read_strip_decoder(part, where);
  } else if (type == "Metaspace") {
    const bool drop = prepend_scheme(part, where) != PrependScheme::kNever;
    parts.decoder.push_back(metaspace_decoder(inserted(part, "replacement", where), drop));
  } else {
    refuse(where, formatted("type {} isn't supported (ByteFallback, ByteLevel, Fuse, Metaspace, "
                            "Replace and Strip are)",
                            type));
  }
}

}  // namespace fsdp::data
