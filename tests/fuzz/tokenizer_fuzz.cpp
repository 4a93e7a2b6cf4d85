// A tokenizer.json, then a zero byte and a tokenizer_config.json, then a zero byte and a text; all
// but the first may be missing. If the tokenizer is usable, it encodes the text and decodes its
// ids.
#include <cstdlib>

#include "data/json_tokenizer.h"
#include "data/unicode.h"
#include "fsdp/error.h"

namespace data = fsdp::data;

namespace {

void encode(const std::shared_ptr<const data::Tokenizer>& tokenizer, std::string_view text) {
  data::EncodeOptions options;
  options.special_tokens = true;
  options.threads = 1;
  const auto ids = tokenizer->encode(text, options);
  std::string shown;
  data::StreamDecoder decoder(tokenizer, false);
  for (int32_t id : ids) {
    if (id < 0 || id >= tokenizer->vocab_size()) std::abort();
    shown += decoder.push(id);
  }
  shown += decoder.finish();
  if (data::valid_prefix(shown) != shown.size()) std::abort();
  tokenizer->decode(ids, true);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  if (size == 0) return 0;
  const std::string_view all(reinterpret_cast<const char*>(bytes), size);
  const size_t config_from = std::min(all.find('\0'), size - 1) + 1;
  const size_t text_from = std::min(all.find('\0', config_from), size - 1) + 1;
  const auto part = [&](size_t from, size_t to) {
    std::string text(all.substr(from, to - from));
    if (text.ends_with('\0')) text.pop_back();
    return text;
  };
  const std::string config = part(config_from, std::max(config_from, text_from));
  const std::string text = part(std::max(config_from, text_from), size).substr(0, 64);
  try {
    const auto tokenizer =
        std::make_shared<data::JsonTokenizer>("fuzzed", part(0, config_from), config);
    encode(tokenizer, text);
    encode(tokenizer, "aaaa aab\n  It's 123 \xc3\xa9\xe4\xbd\xa0 <|endoftext|>\xff.");
  } catch (const fsdp::Error&) {
  }
  return 0;
}
