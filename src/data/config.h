// [data] of a run's config.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/options.h"
#include "data/conversations.h"
#include "data/format.h"

namespace fsdp::data {

struct DataConfig {
  // Files or folders; empty: LibTorch's C++ headers; {"random"}: random tokens, the same every
  // time.
  std::vector<std::string> train;
  std::vector<std::string> valid;  // likewise; empty: `valid_share` of `train`
  double valid_share = 0.02;
  Format format = Format::kAuto;
  std::string tokenizer = "bytes";       // for text: bytes, or a tokenizer.json
  std::string chat_template;             // for conversations: a file; empty: the tokenizer's
  BadLines bad_lines = BadLines::kStop;  // of JSON lines
  int64_t seq = 256;                     // tokens per sample
  bool shuffle = true;
  bool packing = false;        // samples are whole documents side by side, each as if alone
  bool document_mask = false;  // attention stays within a document
  bool loss_mask = false;      // only what FILE.mask selects, or an assistant wrote, counts
  int64_t prefetch = 2;        // batches loaded ahead; 0: each when it is needed

  bool is_random() const;        // some of `train` is "random"
  bool has_token_files() const;  // `format` says so
  JsonlOptions lines() const;    // how JSON lines are read
};

// `language`: the model is a language model.
void describe(DataConfig& data, OptionList& list, const OnlyWith& language);
void check(const DataConfig& data);

}  // namespace fsdp::data
