// What reading the parts of a tokenizer.json has in common: members of the right type, and errors
// that name the file and the part.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "data/tokenizer_json.h"

namespace fsdp::data {

struct TokenizerReader {
  using Json = nlohmann::json;

  std::string name;  // the file
  TokenizerParts parts;
  bool first_only = false;  // Metaspace prepends to the beginning of the text only

  // Below, `where` is the path of a part, as in "normalizer.normalizers".
  [[noreturn]] void refuse(const std::string& what, const std::string& why) const;

  // A member with a default; null counts as missing.
  template <class T>
  T member(const Json& object, const char* key, T otherwise, const std::string& where) const {
    auto found = object.find(key);
    if (found == object.end() || found->is_null()) return otherwise;
    const bool right = std::is_same_v<T, bool> ? found->is_boolean() : found->is_string();
    if (!right) refuse(where + "." + key, "has the wrong type");
    return found->template get<T>();
  }
  const Json& required(const Json& object, const char* key, Json::value_t type,
                       const std::string& where) const;
  // A text that a step inserts; not too long.
  std::string inserted(const Json& object, const char* key, const std::string& where) const;
  std::string type_of(const Json& part, const std::string& where) const;
  int32_t id(const Json& value, const std::string& where) const;
  std::string at(const std::string& where) const { return name + ": " + where; }

  // Keeps a token's spelling. False if another token has the id.
  bool keep_token(int32_t token, const std::string& text);

  // A pattern of a Split or Replace: {"String": ...} or {"Regex": ...}.
  Pattern compile(const std::string& expression, const std::string& where) const;
  std::variant<Pattern, std::string> pattern_of(const Json& part, const std::string& where) const;

  void read_pre_tokenizer(const Json& part, const std::string& where);
  void read_normalizer(const Json& part, const std::string& where);
  void read_decoder(const Json& part, const std::string& where);
  // Needs the pre-tokenizer: it says how the vocabulary spells bytes.
  void read_model(const Json& root);

 private:
  void read_split(const Json& part, const std::string& where);
  void add_split(const Json& part, Pattern pattern, const std::string& where);
  void read_metaspace(const Json& part, const std::string& where);
  PrependScheme prepend_scheme(const Json& part, const std::string& where) const;
  void add_step(WordStep step, const std::string& where);
  void read_strip_decoder(const Json& part, const std::string& where);
};

}  // namespace fsdp::data
