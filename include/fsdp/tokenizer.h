// Tokenizer: text to token ids and back. Two kinds: `bytes`, where a token is a byte, and
// byte-level BPE as Hugging Face's `tokenizers` stores it in a tokenizer.json (GPT-2, Llama 3,
// Qwen 2.5 ...).
//
// The ids of the second kind are those of the `tokenizers` package for the same text. Where the
// text is not valid UTF-8, it is read as Python reads it with errors="replace". docs/data.md says
// which parts of a tokenizer.json are understood; any other is refused by name.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::data {

struct EncodeOptions {
  // Adds what the tokenizer's template puts around a text (Llama 3: <|begin_of_text|>). Off: a
  // corpus is cut into samples anywhere, and documents are told apart by the end-of-document token.
  bool special_tokens = false;
  int threads = 0;  // 0: all cores; the ids do not depend on it
};

class Tokenizer {
 public:
  // "bytes", a tokenizer.json, or a folder that holds one. Throws Error where it cannot be used.
  static std::shared_ptr<const Tokenizer> load(const std::string& what);
  virtual ~Tokenizer() = default;

  // Safe to call from many threads at once, as is everything here. Special tokens that are spelled
  // out in the text become their ids, as in the package.
  virtual std::vector<int32_t> encode(std::string_view text, EncodeOptions options = {}) const = 0;
  // The same for many texts, which share the threads.
  virtual std::vector<std::vector<int32_t>> encode_batch(const std::vector<std::string_view>& texts,
                                                         EncodeOptions options = {}) const = 0;

  // The bytes that the tokens stand for. They are valid UTF-8 where the tokens came from such text,
  // but any sequence of ids is allowed: see StreamDecoder for showing them. Throws Error for an id
  // that is not in the vocabulary.
  std::string decode(const std::vector<int32_t>& ids, bool skip_special = false) const;
  // The bytes of one token.
  virtual std::string_view piece(int32_t id) const = 0;
  virtual bool special(int32_t id) const = 0;

  virtual int32_t vocab_size() const = 0;          // the largest id and 1
  virtual std::optional<int32_t> eos() const = 0;  // ends a document
  virtual std::optional<int32_t> bos() const = 0;  // begins one, where there is such a token
  virtual std::optional<int32_t> id_of(std::string_view token) const = 0;  // a token by its bytes

  virtual std::string name() const = 0;         // "bytes", or the path of the tokenizer.json
  virtual const std::string& json() const = 0;  // the tokenizer.json; empty for bytes
  // Puts tokenizer.json (and tokenizer_config.json, which names the end of a document) into a
  // folder, from which load() makes the same tokenizer. Nothing to do for bytes.
  virtual void save(const std::string& folder) const = 0;
};

// Text for a terminal, token by token. A character whose last bytes have not come yet is held back;
// bytes that can never become one are shown as U+FFFD. What comes out is always valid UTF-8.
class StreamDecoder {
 public:
  explicit StreamDecoder(std::shared_ptr<const Tokenizer> tokenizer, bool skip_special = true);

  std::string push(int32_t id);
  std::string finish();  // what is still held back

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  bool skip_special_;
  std::string held_;
};

}  // namespace fsdp::data
