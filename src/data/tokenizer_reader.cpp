#include "data/tokenizer_reader.h"

#include "base/format.h"
#include "data/text_room.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

constexpr int64_t kMostIds = 1 << 20;  // bounds a table; more means a damaged file

}  // namespace

void TokenizerReader::refuse(const std::string& what, const std::string& why) const {
  throw Error(formatted("{}: {}: {}", name, what, why),
              "BPE and Unigram tokenizers work, such as those of Llama, Qwen, Mistral and Gemma; "
              "docs/data.md lists the supported parts.");
}

const nlohmann::json& TokenizerReader::required(const Json& object, const char* key,
                                                Json::value_t type,
                                                const std::string& where) const {
  auto found = object.find(key);
  if (found == object.end() || found->type() != type)
    refuse(formatted("{}.{}", where, key), "is missing");
  return *found;
}

std::string TokenizerReader::inserted(const Json& object, const char* key,
                                      const std::string& where) const {
  auto text = required(object, key, Json::value_t::string, where).get<std::string>();
  if (text.size() > TextRoom::kLongest)
    refuse(formatted("{}.{}", where, key), formatted("has {} bytes", text.size()));
  return text;
}

std::string TokenizerReader::type_of(const Json& part, const std::string& where) const {
  if (!part.is_object()) refuse(where, "isn't an object");
  if (where.size() > 500) refuse(formatted("{}...", where.substr(0, 40)), "is nested too deeply");
  return member(part, "type", std::string(), where);
}

int32_t TokenizerReader::id(const Json& value, const std::string& where) const {
  if (!value.is_number_integer()) refuse(where, "isn't a token id");
  auto number = value.get<int64_t>();
  if (number < 0 || number >= kMostIds) refuse(where, formatted("{} isn't a token id", number));
  return static_cast<int32_t>(number);
}

bool TokenizerReader::keep_token(int32_t token, const std::string& text) {
  const auto index = static_cast<size_t>(token);
  if (index >= parts.tokens.size()) {
    parts.tokens.resize(index + 1);
    parts.known.resize(index + 1);
  }
  if (parts.known[index] && parts.tokens[index] != text) return false;
  parts.tokens[index] = text;
  parts.known[index] = true;
  return true;
}

Pattern TokenizerReader::compile(const std::string& expression, const std::string& where) const {
  try {
    return Pattern(expression, at(where));
  } catch (const Error& problem) {
    throw Error(formatted("{}: {}", at(where), problem.message()), problem.hint());
  }
}

std::variant<Pattern, std::string> TokenizerReader::pattern_of(const Json& part,
                                                               const std::string& where) const {
  const Json& pattern = required(part, "pattern", Json::value_t::object, where);
  const std::string place = where + ".pattern";
  const auto text = member(pattern, "String", std::string(), place);
  const auto regex = member(pattern, "Regex", std::string(), place);
  if (text.empty() == regex.empty()) refuse(place, "is neither a String nor a Regex, or empty");
  if (text.empty()) return compile(regex, place);
  if (text.size() > TextRoom::kLongest) refuse(place, formatted("has {} bytes", text.size()));
  return text;
}

}  // namespace fsdp::data
