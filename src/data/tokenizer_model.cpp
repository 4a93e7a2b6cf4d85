// Reads the model of a tokenizer.json: the vocabulary, and BPE's merges or Unigram's scores.
#include <unordered_map>

#include "base/format.h"
#include "data/bpe.h"
#include "data/tokenizer_reader.h"
#include "data/unigram.h"

namespace fsdp::data {
namespace {

using Vocabulary = std::unordered_map<std::string, int32_t>;

constexpr std::string_view kLowLine =
    "\xe2\x96\x81";  // U+2581, with which SentencePiece spells ' '

Vocabulary read_vocabulary(TokenizerReader& reader, const nlohmann::json& model) {
  const auto& entries = reader.required(model, "vocab", nlohmann::json::value_t::object, "model");
  Vocabulary vocabulary;
  for (const auto& [token, value] : entries.items()) {
    const std::string where = formatted("model.vocab[{}]", token);
    const int32_t number = reader.id(value, where);
    if (!reader.keep_token(number, token))
      reader.refuse(where, formatted("another token has id {}", number));
    vocabulary.emplace(token, number);
  }
  if (vocabulary.empty()) reader.refuse("model.vocab", "is empty");
  return vocabulary;
}

// Both formats: "a b", and ["a", "b"], which newer versions write.
std::pair<std::string, std::string> read_merge(const TokenizerReader& reader,
                                               const nlohmann::json& entry,
                                               const std::string& where) {
  if (entry.is_string()) {
    const auto& text = entry.get_ref<const std::string&>();
    const size_t space = text.find(' ');
    if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos)
      reader.refuse(where, formatted("\"{}\" isn't a pair", text));
    return {text.substr(0, space), text.substr(space + 1)};
  }
  if (!entry.is_array() || entry.size() != 2 || !entry[0].is_string() || !entry[1].is_string())
    reader.refuse(where, "isn't a pair");
  return {entry[0].get<std::string>(), entry[1].get<std::string>()};
}

struct Merges {
  std::vector<Bpe::Merge> merges;
  bool within_words = true;  // none makes a token with a U+2581 behind another character
};

bool begins_a_word_inside(std::string_view token) {
  for (size_t at = token.find(kLowLine, 1); at != token.npos; at = token.find(kLowLine, at + 1)) {
    if (!token.substr(0, at).ends_with(kLowLine)) return true;
  }
  return false;
}

Merges read_merges(const TokenizerReader& reader, const nlohmann::json& model,
                   const Vocabulary& vocabulary) {
  const auto& entries = reader.required(model, "merges", nlohmann::json::value_t::array, "model");
  Merges result;
  result.merges.reserve(entries.size());
  for (const auto& entry : entries) {
    const std::string where = formatted("model.merges[{}]", result.merges.size());
    const auto [left, right] = read_merge(reader, entry, where);
    const std::string whole = left + right;
    const auto id_of = [&](const std::string& token) {
      const auto found = vocabulary.find(token);
      if (found == vocabulary.end())
        reader.refuse(where, formatted("\"{}\" isn't in the vocabulary", token));
      return found->second;
    };
    result.merges.push_back({id_of(left), id_of(right), id_of(whole)});
    result.within_words = result.within_words && !begins_a_word_inside(whole);
  }
  return result;
}

std::unique_ptr<const Spelling> read_byte_spelling(const TokenizerReader& reader,
                                                   const nlohmann::json& model,
                                                   const Vocabulary& vocabulary) {
  std::array<int32_t, 256> ids;
  bool complete = true;
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = vocabulary.find(token_of_byte(static_cast<unsigned char>(byte)));
    ids[byte] = found == vocabulary.end() ? -1 : found->second;
    complete = complete && found != vocabulary.end();
  }
  // Both handle characters that aren't in the vocabulary. With all bytes in it, there are none.
  if (!complete && !reader.member(model, "unk_token", std::string(), "model").empty())
    reader.refuse("model.unk_token", "is set, but not every byte is in the vocabulary");
  if (!complete && reader.member(model, "byte_fallback", false, "model"))
    reader.refuse("model.byte_fallback", "is set, but not every byte is in the vocabulary");
  return spelling_by_bytes(ids);
}

CharacterRules read_rules(const TokenizerReader& reader, const nlohmann::json& model,
                          const Vocabulary& vocabulary) {
  CharacterRules rules;
  rules.byte_fallback = reader.member(model, "byte_fallback", false, "model");
  rules.fuse_unknown = reader.member(model, "fuse_unk", false, "model");
  const auto unknown = reader.member(model, "unk_token", std::string(), "model");
  const auto found = vocabulary.find(unknown);
  if (!unknown.empty() && found == vocabulary.end())
    reader.refuse("model.unk_token", formatted("\"{}\" isn't in the vocabulary", unknown));
  if (!unknown.empty()) rules.unknown = found->second;
  return rules;
}

// If no merge crosses the beginning of a word, words can be merged one by one, which lets threads
// share a text and the cache find words. Otherwise a text without a pre-tokenizer is one word.
void split_into_words(TokenizerReader& reader) {
  auto splitter = std::make_shared<Splitter>(
      Pattern(formatted("{}+[^{}]*|[^{}]+", kLowLine, kLowLine, kLowLine)), Cut::kIsolated);
  auto& steps = reader.parts.steps;
  if (steps.empty() || steps.back().splitter) steps.emplace_back();
  steps.back().splitter = std::move(splitter);
}

void read_bpe(TokenizerReader& reader, const nlohmann::json& model) {
  const auto dropout = model.find("dropout");
  if (dropout != model.end() && !dropout->is_null() && *dropout != 0)
    reader.refuse("model.dropout", "is set: the ids would be random");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!reader.member(model, key, std::string(), "model").empty())
      reader.refuse(formatted("model.{}", key), "is set, which isn't supported");
  }
  const Vocabulary vocabulary = read_vocabulary(reader, model);
  const bool bytes = reader.parts.byte_level;
  const Merges merges = read_merges(reader, model, vocabulary);
  Vocabulary words;
  if (reader.member(model, "ignore_merges", false, "model")) {
    for (const auto& [token, number] : vocabulary)
      words.emplace(bytes ? bytes_of_token(token) : token, number);
  }
  std::unique_ptr<const Spelling> spelling;
  if (bytes) {
    spelling = read_byte_spelling(reader, model, vocabulary);
  } else {
    const CharacterRules rules = read_rules(reader, model, vocabulary);
    const bool low_line = vocabulary.contains(std::string(kLowLine));
    const bool unknown = rules.unknown >= 0 &&
                         reader.parts.tokens[rules.unknown].find(kLowLine) != std::string::npos;
    if (merges.within_words && words.empty() && low_line && !unknown) split_into_words(reader);
    spelling = spelling_by_characters(vocabulary, rules);
  }
  reader.parts.model = std::make_unique<Bpe>(std::move(spelling), merges.merges, std::move(words));
}

void read_unigram(TokenizerReader& reader, const nlohmann::json& model) {
  if (reader.parts.byte_level)
    reader.refuse("model", "type Unigram isn't supported behind the pre-tokenizer ByteLevel");
  const auto& entries = reader.required(model, "vocab", nlohmann::json::value_t::array, "model");
  std::vector<std::pair<std::string, double>> vocabulary;
  Vocabulary seen;
  for (const auto& entry : entries) {
    const auto number = static_cast<int32_t>(vocabulary.size());
    const std::string where = formatted("model.vocab[{}]", number);
    if (!entry.is_array() || entry.size() != 2 || !entry[0].is_string() || !entry[1].is_number())
      reader.refuse(where, "isn't a token and its score");
    reader.id(number, where);
    auto token = entry[0].get<std::string>();
    if (token.size() > Unigram::kLongest)
      reader.refuse(where, formatted("has {} bytes", token.size()));
    if (!seen.emplace(token, number).second) reader.refuse(where, "appears twice");
    reader.keep_token(number, token);
    vocabulary.emplace_back(std::move(token), entry[1].get<double>());
  }
  if (vocabulary.empty()) reader.refuse("model.vocab", "is empty");
  const auto unknown = model.find("unk_id");
  if (unknown == model.end() || unknown->is_null())
    reader.refuse("model.unk_id", "is missing: a text may have characters that aren't tokens");
  const int32_t id = reader.id(*unknown, "model.unk_id");
  if (static_cast<size_t>(id) >= vocabulary.size())
    reader.refuse("model.unk_id", formatted("{} isn't in the vocabulary", id));
  reader.parts.model = std::make_unique<Unigram>(
      vocabulary, id, reader.member(model, "byte_fallback", false, "model"));
}

}  // namespace

void TokenizerReader::read_model(const Json& root) {
  const Json& model = required(root, "model", Json::value_t::object, "tokenizer");
  const std::string type = member(model, "type", std::string("BPE"), "model");
  if (type == "BPE") return read_bpe(*this, model);
  if (type == "Unigram") return read_unigram(*this, model);
  refuse("model", formatted("type {} isn't supported (BPE and Unigram are)", type));
}

}  // namespace fsdp::data
