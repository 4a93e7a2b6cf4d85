// Long texts. The first byte chooses the patterns of a tokenizer, the second the size of a piece of
// work; the rest is words with how often they are repeated. Ids don't depend on pieces and threads,
// and decode to the text.
#include <algorithm>
#include <cstdlib>

#include "data/json_tokenizer.h"
#include "data/spelling.h"
#include "data/unicode.h"
#include "fsdp/error.h"

namespace data = fsdp::data;

namespace {

// Bytes of a text; more is too slow under the sanitizers.
#ifdef __OPTIMIZE__
constexpr size_t kLongest = 1 << 14;
#else
constexpr size_t kLongest = 1 << 12;
#endif

const char* const kPatterns[] = {
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+)",
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+)",
    R"([^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|\\p{N}{1,3}|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+|.)",
    R"([^z]++z|[^z])",
};

// All bytes and a few merges, as a tokenizer.json.
std::string json_of(const char* pattern) {
  std::string vocabulary, merges;
  int next = 0;
  const auto add = [&](const std::string& token) {
    std::string quoted;
    for (const char c : token)
      quoted += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    vocabulary += (next ? ",\"" : "\"") + quoted + "\":" + std::to_string(next);
    ++next;
  };
  for (int byte = 0; byte < 256; ++byte) add(data::token_of_byte(static_cast<unsigned char>(byte)));
  const std::string space = data::token_of_byte(' ');
  for (const auto& [left, right] : {std::pair<std::string, std::string>{"a", "b"},
                                    {"ab", "ab"},
                                    {"a", "a"},
                                    {"aa", "aa"},
                                    {space, space},
                                    {space, "a"},
                                    {"1", "2"}}) {
    add(left + right);
    merges += (merges.empty() ? "\"" : ",\"") + left + " " + right + "\"";
  }
  return R"({"model":{"type":"BPE","vocab":{)" + vocabulary + R"(},"merges":[)" + merges +
         R"(]},"normalizer":null,"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split",)"
         R"("behavior":"Isolated","pattern":{"Regex":")" +
         pattern +
         R"("}},{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]},"added_tokens":[)"
         R"({"id":300,"content":"<s>","lstrip":true,"rstrip":true},)"
         R"({"id":301,"content":"  ","lstrip":true,"single_word":true}]})";
}

// "LENGTH REPEATS word LENGTH REPEATS word ...", each number a byte.
std::string text_of(std::string_view spec) {
  std::string text;
  while (spec.size() > 2 && text.size() < kLongest) {
    const size_t length = static_cast<unsigned char>(spec[0]) % 16 + 1;
    size_t repeats = size_t{1} << (static_cast<unsigned char>(spec[1]) % 15);
    const std::string_view word = spec.substr(2, length);
    while (repeats-- > 0 && text.size() < kLongest) text += word;
    spec.remove_prefix(2 + word.size());
  }
  return text;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  if (size < 2) return 0;
  constexpr size_t kCount = std::size(kPatterns);
  static std::unique_ptr<data::JsonTokenizer> whole[kCount], cut[kCount];
  const size_t which = bytes[0] % kCount;
  if (!whole[which]) {
    whole[which] = std::make_unique<data::JsonTokenizer>("whole", json_of(kPatterns[which]), "");
    cut[which] = std::make_unique<data::JsonTokenizer>("cut", json_of(kPatterns[which]), "");
    whole[which]->set_chunk(size_t{1} << 30);
  }
  cut[which]->set_chunk(size_t{1} << (bytes[1] % 12));
  const std::string text = text_of({reinterpret_cast<const char*>(bytes + 2), size - 2});
  std::vector<int32_t> ids;
  try {
    ids = whole[which]->encode(text, {.threads = 1});
    if (cut[which]->encode(text, {.threads = 1}) != ids) std::abort();
  } catch (const fsdp::Error&) {
    return 0;
  }
  if (text.find("<s>") == std::string::npos && text.find("  ") == std::string::npos &&
      whole[which]->decode(ids) != data::repaired(text))
    std::abort();
  return 0;
}
