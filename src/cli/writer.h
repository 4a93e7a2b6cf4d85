// Writer: the model behind `fsdp generate`, from a run, a checkpoint, or a directory of Hugging
// Face's transformers or PEFT.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "fsdp/tokenizer.h"
#include "train/sample.h"
#include "train/task.h"

namespace fsdp::cli {

// What is known before weights are read.
struct WriterFiles {
  std::filesystem::path weights;
  train::Config config;
  std::shared_ptr<const data::Tokenizer> tokenizer;
  bool special_tokens = false;    // prompts start as the tokenizer's template says
  std::string generation = "";    // text of generation_config.json; empty: none
  std::string model_config = "";  // text of config.json; empty: none
};

// `tokenizer`: bytes or a path; empty: the model's own. Throws Error.
WriterFiles find_writer(const std::string& where, const std::string& tokenizer);

// What the model's makers recommend for sampling: those of generation_config.json, if it samples.
void take_sampling(const WriterFiles& files, train::SampleOptions& options);

class Writer {
 public:
  // Reads the weights. `device`: auto, cpu or cuda.
  Writer(WriterFiles files, const std::string& device);

  const WriterFiles& files() const { return files_; }
  const data::Tokenizer& tokenizer() const { return *files_.tokenizer; }
  std::shared_ptr<const data::Tokenizer> shared_tokenizer() const { return files_.tokenizer; }
  const std::string& title() const { return task_.title; }
  // The tokens that end a text: the tokenizer's, and those in the model's config files.
  const std::set<int64_t>& ends() const { return ends_; }
  void add_end(int64_t token) { ends_.insert(token); }

  // The tokens of a text to continue, at least one. `template_written`: a chat template wrote it,
  // with all special tokens. Throws Error for tokens outside of the model's vocabulary.
  std::vector<int64_t> encode(const std::string& text, bool template_written = false) const;

  // Continues a prompt and passes each piece of text as soon as it is whole; `show` returns whether
  // to continue. Returns how many tokens were made.
  int64_t write(const std::vector<int64_t>& prompt, const train::SampleOptions& options,
                const std::function<bool(const std::string&)>& show);
  // Continues several prompts together: each one's text, and whether it ended by itself.
  struct Written {
    std::string text;
    int64_t tokens = 0;
    bool ended = false;
  };
  std::vector<Written> write_batch(const std::vector<std::vector<int64_t>>& prompts,
                                   const train::SampleOptions& options, uint64_t first);

 private:
  WriterFiles files_;
  train::TrainTask task_;
  at::Device device_;
  std::set<int64_t> ends_;
};

}  // namespace fsdp::cli
