// JsonTokenizer: a Hugging Face tokenizer.json. See fsdp/tokenizer.h.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "data/added_tokens.h"
#include "data/tokenizer_json.h"
#include "fsdp/tokenizer.h"

namespace fsdp::data {

class JsonTokenizer : public Tokenizer {
 public:
  // `config`: the tokenizer_config.json next to the tokenizer.json, which names eos and bos; or
  // empty. `chat_template`: the chat_template.jinja next to it, or empty.
  JsonTokenizer(std::string name, std::string json, std::string config,
                std::string chat_template = {});

  std::vector<int32_t> encode(std::string_view text, EncodeOptions options) const override;
  std::vector<std::vector<int32_t>> encode_batch(const std::vector<std::string_view>& texts,
                                                 EncodeOptions options) const override;
  std::string decode(const std::vector<int32_t>& ids, bool skip_special = false) const override;
  std::string_view piece(int32_t id) const override;
  bool special(int32_t id) const override { return special_.at(id); }
  int32_t vocab_size() const override { return static_cast<int32_t>(parts_.pieces.size()); }
  std::optional<int32_t> eos() const override { return eos_; }
  std::optional<int32_t> bos() const override { return bos_; }
  std::optional<int32_t> id_of(std::string_view token) const override;
  std::string name() const override { return name_; }
  const std::string& json() const override { return json_; }
  std::string chat_template() const override;
  void save(const std::string& folder) const override;

  // Bytes of text per thread and piece of work. Only tests change it.
  void set_chunk(size_t bytes) { chunk_ = bytes; }

 private:
  struct Segment;  // a part of the text, or an added token found in it
  struct Work;     // a piece of work for one thread
  class Lease;     // exclusive use of a Model::Scratch

  struct Scanning;  // what a scan uses and fills

  // `storage` owns the texts that had to be changed.
  std::vector<Segment> segments(std::string_view text, int threads,
                                std::deque<std::string>& storage) const;
  std::vector<AddedToken> added(bool normalized) const;
  const Splitter* first_splitter() const;  // which threads can share a segment by, or null
  std::vector<Work> cut(const std::vector<Segment>& segments) const;
  void run(const std::vector<Segment>& segments, Work& work) const;
  size_t scan_piece(const Segment& segment, size_t from, size_t limit, Scanning& scanning) const;
  void words(std::string_view piece, size_t step, bool first, Scanning& scanning) const;
  void split(std::string_view piece, size_t step, bool first, Scanning& scanning) const;
  size_t join(const std::vector<Segment>& segments, Work& work, size_t from, PatternBudget& budget,
              std::vector<int32_t>& ids) const;
  PatternBudget budget_for(size_t bytes) const {
    return PatternBudget(bytes, std::max<size_t>(1, parts_.steps.size()));
  }

  std::string name_, json_, config_, chat_template_;
  TokenizerParts parts_;
  AddedTokens raw_, normal_;  // matched before and after normalization
  std::vector<bool> special_;
  std::optional<int32_t> eos_, bos_;
  size_t chunk_ = size_t{1} << 18;

  mutable Mutex mutex_;
  mutable std::vector<std::unique_ptr<Model::Scratch>> idle_ FSDP_GUARDED_BY(mutex_);
};

}  // namespace fsdp::data
