/// @file
/// Text to token ids and back.
///
/// Two kinds: `bytes`, where a token is a byte, and BPE or Unigram as Hugging Face's `tokenizers`
/// package stores it in a tokenizer.json (Llama, Qwen, Mistral, Gemma, …). The ids equal that
/// package's for the same text. Invalid UTF-8 is read as Python reads it with errors="replace".
/// docs/data.md says which parts of a tokenizer.json are supported; any other is an Error that
/// names it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::data {

/// Options of Tokenizer::encode().
struct EncodeOptions {
  /// Adds what the tokenizer's template puts around a text (Llama 3: `<|begin_of_text|>`). Off for
  /// a corpus: it is cut into samples anywhere, and the end-of-document token separates documents.
  bool special_tokens = false;
  int threads = 0;  ///< Number of threads; 0: all cores. Doesn't change the ids.
};

/// Text to token ids and back. Immutable: any number of threads may call it at once.
class Tokenizer {
 public:
  /// "bytes", a tokenizer.json, or a folder that holds one. Throws Error if it can't be used.
  static std::shared_ptr<const Tokenizer> load(const std::string& what);
  virtual ~Tokenizer() = default;

  /// The ids of a text. Special tokens spelled out in the text become their ids.
  virtual std::vector<int32_t> encode(std::string_view text, EncodeOptions options = {}) const = 0;
  /// The ids of many texts, which share the threads.
  virtual std::vector<std::vector<int32_t>> encode_batch(const std::vector<std::string_view>& texts,
                                                         EncodeOptions options = {}) const = 0;

  /// The bytes that the ids stand for: valid UTF-8 if the ids came from such text, but not for
  /// every sequence of ids; StreamDecoder makes text for display. Throws Error for an id outside
  /// the vocabulary. Tokenizers in the style of SentencePiece drop the space that they put before
  /// the first word.
  virtual std::string decode(const std::vector<int32_t>& ids, bool skip_special = false) const;
  /// The bytes of one token, within a text.
  virtual std::string_view piece(int32_t id) const = 0;
  /// Whether a token is special.
  virtual bool special(int32_t id) const = 0;

  virtual int32_t vocab_size() const = 0;          ///< The largest id plus 1.
  virtual std::optional<int32_t> eos() const = 0;  ///< The token that ends a document, if any.
  virtual std::optional<int32_t> bos() const = 0;  ///< The token that begins one, if any.

  /// A token by its bytes.
  virtual std::optional<int32_t> id_of(std::string_view token) const = 0;

  virtual std::string name() const = 0;         ///< "bytes", or the path of the tokenizer.json.
  virtual const std::string& json() const = 0;  ///< The tokenizer.json's text; empty for bytes.

  /// The chat template beside the tokenizer.json: chat_template.jinja, or chat_template of
  /// tokenizer_config.json. Empty if there is none.
  virtual std::string chat_template() const { return ""; }

  /// Writes tokenizer.json (and tokenizer_config.json, which names the end-of-document token, and
  /// chat_template.jinja) to a folder that load() accepts. Does nothing for bytes.
  virtual void save(const std::string& folder) const = 0;
};

/// Token by token to text for a terminal. The output is always valid UTF-8.
class StreamDecoder {
 public:
  /// With skip_special, special tokens give no text.
  explicit StreamDecoder(std::shared_ptr<const Tokenizer> tokenizer, bool skip_special = true);

  /// The text that this token completes. Holds an incomplete character back, and replaces bytes
  /// that can't become one by U+FFFD.
  std::string push(int32_t id);
  /// What is still held back.
  std::string finish();

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  bool skip_special_;
  bool first_ = true;  // no token has been shown
  std::string held_;
};

}  // namespace fsdp::data
