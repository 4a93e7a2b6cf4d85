#include "data/tokenizer_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

#include "base/format.h"
#include "data/spelling.h"
#include "data/tokenizer_reader.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

constexpr size_t kLongestAdded = 1000;  // bytes: at each byte of a text, so many may be compared

void read_template(TokenizerReader& reader, const nlohmann::json& part, const std::string& where) {
  const nlohmann::json& tokens =
      reader.required(part, "special_tokens", nlohmann::json::value_t::object, where);
  bool behind = false;
  for (const nlohmann::json& item :
       reader.required(part, "single", nlohmann::json::value_t::array, where)) {
    if (item.is_object() && item.contains("Sequence")) {
      if (behind) reader.refuse(formatted("{}.single", where), "contains the text twice");
      behind = true;
      continue;
    }
    if (!item.is_object() || !item.contains("SpecialToken"))
      reader.refuse(formatted("{}.single", where), "isn't supported");
    std::string token = reader.member(item["SpecialToken"], "id", std::string(), where);
    auto found = tokens.find(token);
    if (found == tokens.end())
      reader.refuse(formatted("{}.special_tokens", where), formatted("has no \"{}\"", token));
    for (const nlohmann::json& value :
         reader.required(*found, "ids", nlohmann::json::value_t::array, where)) {
      (behind ? reader.parts.after : reader.parts.before)
          .push_back(reader.id(value, where + ".special_tokens"));
    }
  }
  if (!behind) reader.refuse(formatted("{}.single", where), "doesn't contain the text");
}

void read_post_processor(TokenizerReader& reader, const nlohmann::json& part,
                         const std::string& where) {
  std::string type = reader.type_of(part, where);
  if (type == "Sequence") {
    for (const nlohmann::json& inner :
         reader.required(part, "processors", nlohmann::json::value_t::array, where)) {
      read_post_processor(reader, inner, where + ".processors");
    }
  } else if (type == "TemplateProcessing") {
    if (!reader.parts.before.empty() || !reader.parts.after.empty())
      reader.refuse(where, "there are two templates");
    read_template(reader, part, where);
  } else if (type != "ByteLevel") {  // which affects only offsets
    reader.refuse(
        where, formatted("type {} isn't supported (ByteLevel and TemplateProcessing are)", type));
  }
}

void read_added(TokenizerReader& reader, const nlohmann::json& entries) {
  if (!entries.is_array()) reader.refuse("added_tokens", "isn't a list");
  std::unordered_map<std::string, int32_t> vocabulary;
  for (size_t i = 0; i < reader.parts.tokens.size(); ++i) {
    if (reader.parts.known[i]) vocabulary.emplace(reader.parts.tokens[i], i);
  }
  std::unordered_set<std::string> seen;
  for (const nlohmann::json& entry : entries) {
    std::string where = formatted("added_tokens[{}]", seen.size());
    if (!entry.is_object()) reader.refuse(where, "isn't an object");
    const auto flag = [&](const char* key) { return reader.member(entry, key, false, where); };
    AddedToken token;
    token.content = reader.member(entry, "content", std::string(), where);
    token.id =
        reader.id(reader.required(entry, "id", nlohmann::json::value_t::number_unsigned, where),
                  where + ".id");
    token.special = flag("special");
    token.single_word = flag("single_word");
    token.lstrip = flag("lstrip");
    token.rstrip = flag("rstrip");
    token.normalized = reader.member(entry, "normalized", !token.special, where);
    if (token.content.size() > kLongestAdded)
      reader.refuse(formatted("{}.content", where),
                    formatted("has {} bytes", token.content.size()));
    if (token.content.empty() || !seen.insert(token.content).second)
      reader.refuse(formatted("{}.content", where), "is empty or appears twice");
    auto in_vocabulary = vocabulary.find(token.content);
    if (in_vocabulary != vocabulary.end() && in_vocabulary->second != token.id)
      reader.refuse(where, formatted("\"{}\" has another id in the vocabulary", token.content));
    if (!reader.keep_token(token.id, token.content))
      reader.refuse(where, formatted("another token has id {}", token.id));
    reader.parts.added.push_back(std::move(token));
  }
}

void normalize_added(TokenizerReader& reader) {
  TokenizerParts& parts = reader.parts;
  for (const AddedToken& token : parts.added) {
    if (!token.normalized) continue;
    Normalizing work(token.content.size(), parts.normalizers.size(), 1);
    std::string storage;
    const auto content = normalized(parts.normalizers, token.content, work, storage);
    if (content.empty())
      reader.refuse("added_tokens", formatted("\"{}\" is normalized to nothing", token.content));
    parts.tokens[token.id] = std::string(content);
  }
}

// The bytes of each token.
void make_pieces(TokenizerParts& parts) {
  parts.pieces.resize(parts.tokens.size());
  for (size_t i = 0; i < parts.tokens.size(); ++i) {
    if (!parts.known[i]) continue;
    parts.pieces[i] = parts.byte_level ? bytes_of_token(parts.tokens[i])
                                       : decoded_piece(parts.decoder, parts.tokens[i]);
  }
}

void require_known(const TokenizerReader& reader, const std::vector<int32_t>& ids) {
  for (int32_t token : ids) {
    if (static_cast<size_t>(token) >= reader.parts.known.size() || !reader.parts.known[token])
      reader.refuse("post_processor", formatted("id {} isn't in the vocabulary", token));
  }
}

void read_tokenizer(TokenizerReader& reader, const nlohmann::json& root) {
  if (!root.is_object()) reader.refuse("the file", "isn't a tokenizer");
  auto part = [&](const char* key) -> const nlohmann::json* {
    auto found = root.find(key);
    return found == root.end() || found->is_null() ? nullptr : &*found;
  };
  TokenizerParts& parts = reader.parts;
  if (auto* words = part("pre_tokenizer")) reader.read_pre_tokenizer(*words, "pre_tokenizer");
  if (auto* normalizer = part("normalizer")) reader.read_normalizer(*normalizer, "normalizer");
  const auto moves = [](const auto& step) { return step->moves_begin(); };
  if (reader.first_only && std::any_of(parts.normalizers.begin(), parts.normalizers.end(), moves))
    reader.refuse("pre_tokenizer.prepend_scheme",
                  "first isn't supported with a normalizer that changes where a text begins");
  reader.read_model(root);
  if (auto* after = part("post_processor")) read_post_processor(reader, *after, "post_processor");
  if (auto* decoder = part("decoder")) reader.read_decoder(*decoder, "decoder");
  if (parts.decoder.empty() && !parts.byte_level) reader.refuse("decoder", "is missing");
  if (auto* added = part("added_tokens")) read_added(reader, *added);
  require_known(reader, parts.before);
  require_known(reader, parts.after);
  // Among characters an added token adds its own text, without what normalizing puts before it.
  if (!parts.byte_level) make_pieces(parts);
  normalize_added(reader);
  if (parts.byte_level) make_pieces(parts);
}

}  // namespace

TokenizerParts parse_tokenizer(const std::string& text, const std::string& name) {
  nlohmann::json root;
  try {
    root = nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& problem) {
    throw Error(
        formatted("{} isn't valid JSON: {}", name, problem.what()),
        "it may be truncated, or a Git LFS pointer instead of the file; download it again.");
  }
  TokenizerReader reader;
  reader.name = name;
  read_tokenizer(reader, root);
  return std::move(reader.parts);
}

}  // namespace fsdp::data
