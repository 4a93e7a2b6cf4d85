#include "data/tokenizer_json.h"

#include <nlohmann/json.hpp>
#include <unordered_set>

#include "base/format.h"
#include "data/unicode.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMostIds = 1 << 22;   // bounds a table; more means a damaged file
constexpr size_t kLongestAdded = 1000;  // bytes: at each byte of a text, so many may be compared
constexpr size_t kMostSteps = 64;       // of splitting into words; each is a level of recursion

// ByteLevel's own pattern, used unless use_regex is false.
constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

struct TokenizerReader {
  const std::string& name;
  TokenizerParts parts;
  std::unordered_map<std::string, int32_t> vocab;

  [[noreturn]] void refuse(const std::string& what, const std::string& why) const {
    throw Error(formatted("{}: {}: {}", name, what, why),
                "byte-level BPE tokenizers work, such as those of GPT-2, Llama 3 and Qwen 2.5; "
                "docs/data.md lists the supported parts.");
  }

  // A member with a default; null counts as missing.
  template <class T>
  T member(const Json& object, const char* key, T otherwise, const std::string& where) const {
    auto found = object.find(key);
    if (found == object.end() || found->is_null()) return otherwise;
    bool right = std::is_same_v<T, bool> ? found->is_boolean() : found->is_string();
    if (!right) refuse(formatted("{}.{}", where, key), "has the wrong type");
    return found->template get<T>();
  }

  const Json& required(const Json& object, const char* key, Json::value_t type,
                       const std::string& where) const {
    auto found = object.find(key);
    if (found == object.end() || found->type() != type)
      refuse(formatted("{}.{}", where, key), "is missing");
    return *found;
  }

  std::string type_of(const Json& part, const std::string& where) const {
    if (!part.is_object()) refuse(where, "isn't an object");
    if (where.size() > 500) refuse(formatted("{}...", where.substr(0, 40)), "is nested too deeply");
    return member(part, "type", std::string(), where);
  }

  int32_t id(const Json& value, const std::string& where) const {
    if (!value.is_number_integer()) refuse(where, "isn't a token id");
    auto number = value.get<int64_t>();
    if (number < 0 || number >= kMostIds) refuse(where, formatted("{} isn't a token id", number));
    return static_cast<int32_t>(number);
  }

  void keep_piece(int32_t token, const std::string& text) {
    if (static_cast<size_t>(token) >= parts.pieces.size()) {
      parts.pieces.resize(token + 1);
      parts.known.resize(token + 1);
    }
    parts.pieces[token] = bytes_of_token(text);
    parts.known[token] = true;
  }

  void read_vocab(const Json& model) {
    const Json& entries = required(model, "vocab", Json::value_t::object, "model");
    for (const auto& [token, value] : entries.items()) {
      int32_t number = id(value, "model.vocab[" + token + "]");
      if (static_cast<size_t>(number) < parts.known.size() && parts.known[number]) {
        refuse(formatted("model.vocab[{}]", token), formatted("another token has id {}", number));
      }
      vocab.emplace(token, number);
      keep_piece(number, token);
    }
    if (vocab.empty()) refuse("model.vocab", "is empty");
  }

  // Both formats: "a b", and ["a", "b"], which newer versions write.
  std::vector<Bpe::Merge> read_merges(const Json& model) const {
    const Json& entries = required(model, "merges", Json::value_t::array, "model");
    std::vector<Bpe::Merge> merges;
    merges.reserve(entries.size());
    for (const Json& entry : entries) {
      std::string where = formatted("model.merges[{}]", merges.size());
      std::string left, right;
      if (entry.is_string()) {
        const auto& text = entry.get_ref<const std::string&>();
        size_t space = text.find(' ');
        if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
          refuse(where, formatted("\"{}\" isn't a pair", text));
        }
        left = text.substr(0, space);
        right = text.substr(space + 1);
      } else if (entry.is_array() && entry.size() == 2 && entry[0].is_string() &&
                 entry[1].is_string()) {
        left = entry[0].get<std::string>();
        right = entry[1].get<std::string>();
      } else {
        refuse(where, "isn't a pair");
      }
      auto a = vocab.find(left), b = vocab.find(right), both = vocab.find(left + right);
      for (const auto& [found, text] : {std::pair{a, left}, {b, right}, {both, left + right}}) {
        if (found == vocab.end()) refuse(where, formatted("\"{}\" isn't in the vocabulary", text));
      }
      merges.push_back({a->second, b->second, both->second});
    }
    return merges;
  }

  void read_model(const Json& root) {
    const Json& model = required(root, "model", Json::value_t::object, "tokenizer");
    std::string type = member(model, "type", std::string("BPE"), "model");
    if (type != "BPE") refuse("model", formatted("type {} isn't supported (BPE is)", type));
    auto dropout = model.find("dropout");
    if (dropout != model.end() && !dropout->is_null() && *dropout != 0) {
      refuse("model.dropout", "is set: the ids would be random");
    }
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (!member(model, key, std::string(), "model").empty()) {
        refuse(formatted("model.{}", key), "is set: byte-level tokenizers don't use it");
      }
    }
    read_vocab(model);
    std::array<int32_t, 256> byte_ids;
    bool complete = true;
    for (int byte = 0; byte < 256; ++byte) {
      auto found = vocab.find(token_of_byte(static_cast<unsigned char>(byte)));
      byte_ids[byte] = found == vocab.end() ? -1 : found->second;
      complete = complete && found != vocab.end();
    }
    // Both handle characters that aren't in the vocabulary. With all bytes in it, there are none.
    if (!complete && !member(model, "unk_token", std::string(), "model").empty()) {
      refuse("model.unk_token", "is set, but not every byte is in the vocabulary");
    }
    if (!complete && member(model, "byte_fallback", false, "model")) {
      refuse("model.byte_fallback", "is set, but not every byte is in the vocabulary");
    }
    std::unordered_map<std::string, int32_t> words;
    if (member(model, "ignore_merges", false, "model")) {
      for (const auto& [token, number] : vocab) words.emplace(bytes_of_token(token), number);
    }
    parts.bpe = std::make_shared<Bpe>(byte_ids, read_merges(model), std::move(words));
  }

  void read_normalizer(const Json& part, const std::string& where) {
    std::string type = type_of(part, where);
    if (type == "Sequence") {
      for (const Json& inner : required(part, "normalizers", Json::value_t::array, where)) {
        read_normalizer(inner, where + ".normalizers");
      }
    } else if (type == "NFC") {
      parts.nfc = true;
    } else {
      refuse(where, formatted("type {} isn't supported (NFC is)", type));
    }
  }

  void read_split(const Json& part, const std::string& where) {
    const Json& pattern = required(part, "pattern", Json::value_t::object, where);
    auto regex = pattern.find("Regex");
    if (regex == pattern.end() || !regex->is_string()) {
      refuse(formatted("{}.pattern", where), "only regular expressions are supported");
    }
    std::string behavior = member(part, "behavior", std::string(), where);
    if (behavior != "Isolated")
      refuse(formatted("{}.behavior", where),
             formatted("{} isn't supported (Isolated is)", behavior));
    if (member(part, "invert", false, where))
      refuse(formatted("{}.invert", where), "isn't supported");
    try {
      parts.steps.push_back({false, std::make_shared<Pattern>(regex->get<std::string>(),
                                                              formatted("{}: {}", name, where))});
    } catch (const Error& problem) {
      throw Error(formatted("{}: {}: {}", name, where, problem.message()), problem.hint());
    }
  }

  // True if this was ByteLevel, which must be the last step: it turns words into bytes.
  bool read_pre_tokenizer(const Json& part, const std::string& where) {
    std::string type = type_of(part, where);
    if (type == "Sequence") {
      bool done = false;
      for (const Json& inner : required(part, "pretokenizers", Json::value_t::array, where)) {
        if (done) refuse(where, "a step follows ByteLevel");
        if (parts.steps.size() >= kMostSteps) refuse(where, "has too many steps");
        done = read_pre_tokenizer(inner, where + ".pretokenizers");
      }
      return done;
    }
    if (type == "Split") return read_split(part, where), false;
    if (type != "ByteLevel")
      refuse(where, formatted("type {} isn't supported (ByteLevel and Split are)", type));
    WordStep step;
    step.prefix_space = member(part, "add_prefix_space", true, where);
    if (member(part, "use_regex", true, where))
      step.pattern = std::make_shared<Pattern>(kGpt2Pattern, formatted("{}: {}", name, where));
    parts.steps.push_back(std::move(step));
    return true;
  }

  void read_template(const Json& part, const std::string& where) {
    const Json& tokens = required(part, "special_tokens", Json::value_t::object, where);
    bool behind = false;
    for (const Json& item : required(part, "single", Json::value_t::array, where)) {
      if (item.is_object() && item.contains("Sequence")) {
        if (behind) refuse(formatted("{}.single", where), "contains the text twice");
        behind = true;
        continue;
      }
      if (!item.is_object() || !item.contains("SpecialToken"))
        refuse(formatted("{}.single", where), "isn't supported");
      std::string token = member(item["SpecialToken"], "id", std::string(), where);
      auto found = tokens.find(token);
      if (found == tokens.end())
        refuse(formatted("{}.special_tokens", where), formatted("has no \"{}\"", token));
      for (const Json& value : required(*found, "ids", Json::value_t::array, where)) {
        (behind ? parts.after : parts.before).push_back(id(value, where + ".special_tokens"));
      }
    }
    if (!behind) refuse(formatted("{}.single", where), "doesn't contain the text");
  }

  void read_post_processor(const Json& part, const std::string& where) {
    std::string type = type_of(part, where);
    if (type == "Sequence") {
      for (const Json& inner : required(part, "processors", Json::value_t::array, where)) {
        read_post_processor(inner, where + ".processors");
      }
    } else if (type == "TemplateProcessing") {
      if (!parts.before.empty() || !parts.after.empty()) refuse(where, "there are two templates");
      read_template(part, where);
    } else if (type != "ByteLevel") {  // which affects only offsets
      refuse(where,
             formatted("type {} isn't supported (ByteLevel and TemplateProcessing are)", type));
    }
  }

  void read_decoder(const Json& part, const std::string& where) const {
    std::string type = type_of(part, where);
    if (type == "Sequence") {
      for (const Json& inner : required(part, "decoders", Json::value_t::array, where)) {
        read_decoder(inner, where + ".decoders");
      }
    } else if (type != "ByteLevel") {
      refuse(where, formatted("type {} isn't supported (ByteLevel is)", type));
    }
  }

  void read_added(const Json& entries) {
    if (!entries.is_array()) refuse("added_tokens", "isn't a list");
    std::unordered_set<std::string> seen;
    for (const Json& entry : entries) {
      std::string where = formatted("added_tokens[{}]", seen.size());
      if (!entry.is_object()) refuse(where, "isn't an object");
      AddedToken token;
      token.content = member(entry, "content", std::string(), where);
      token.id = id(required(entry, "id", Json::value_t::number_unsigned, where), where + ".id");
      token.special = member(entry, "special", false, where);
      token.single_word = member(entry, "single_word", false, where);
      token.lstrip = member(entry, "lstrip", false, where);
      token.rstrip = member(entry, "rstrip", false, where);
      token.normalized = member(entry, "normalized", !token.special, where);
      if (token.content.size() > kLongestAdded)
        refuse(formatted("{}.content", where), formatted("has {} bytes", token.content.size()));
      if (token.content.empty() || !seen.insert(token.content).second) {
        refuse(formatted("{}.content", where), "is empty or appears twice");
      }
      auto in_vocab = vocab.find(token.content);
      if (in_vocab != vocab.end() && in_vocab->second != token.id) {
        refuse(where, formatted("\"{}\" has another id in the vocabulary", token.content));
      }
      bool taken = static_cast<size_t>(token.id) < parts.known.size() && parts.known[token.id];
      if (taken && in_vocab == vocab.end()) {
        refuse(where, formatted("another token has id {}", token.id));
      }
      keep_piece(token.id, token.content);
      parts.added.push_back(std::move(token));
    }
  }

  void read(const Json& root) {
    if (!root.is_object()) refuse("the file", "isn't a tokenizer");
    read_model(root);
    auto part = [&](const char* key) -> const Json* {
      auto found = root.find(key);
      return found == root.end() || found->is_null() ? nullptr : &*found;
    };
    if (auto* normalizer = part("normalizer")) read_normalizer(*normalizer, "normalizer");
    auto* words = part("pre_tokenizer");
    if (!words || !read_pre_tokenizer(*words, "pre_tokenizer")) {
      refuse("pre_tokenizer", "has no ByteLevel: this isn't a byte-level tokenizer");
    }
    if (auto* after = part("post_processor")) read_post_processor(*after, "post_processor");
    if (auto* decoder = part("decoder")) read_decoder(*decoder, "decoder");
    if (auto* added = part("added_tokens")) read_added(*added);
    for (int32_t token : parts.before) require_known(token);
    for (int32_t token : parts.after) require_known(token);
  }

  void require_known(int32_t token) const {
    if (static_cast<size_t>(token) < parts.known.size() && parts.known[token]) return;
    refuse("post_processor", formatted("id {} isn't in the vocabulary", token));
  }
};

}  // namespace

TokenizerParts parse_tokenizer(const std::string& text, const std::string& name) {
  Json root;
  try {
    root = Json::parse(text);
  } catch (const Json::exception& problem) {
    throw Error(
        formatted("{} isn't valid JSON: {}", name, problem.what()),
        "it may be truncated, or a Git LFS pointer instead of the file; download it again.");
  }
  TokenizerReader reader{name, {}, {}};
  reader.read(root);
  return std::move(reader.parts);
}

}  // namespace fsdp::data
