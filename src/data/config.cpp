#include "data/config.h"

#include <algorithm>

#include "fsdp/error.h"

namespace fsdp::data {

bool DataConfig::is_random() const {
  return std::find(train.begin(), train.end(), "random") != train.end();
}

bool DataConfig::has_token_files() const {
  return format != Format::kAuto && format != Format::kText;
}

JsonlOptions DataConfig::lines() const {
  JsonlOptions options;
  options.chat_template = chat_template;
  options.bad_lines = bad_lines;
  return options;
}

void describe(DataConfig& data, OptionList& list, const OnlyWith& language) {
  list.section("data", "Training and validation data");
  list.add("train", data.train,
           "Files or folders to train on, relative to the working directory; []: LibTorch's C++ "
           "headers; [\"random\"]: random tokens");
  list.add("valid", data.valid, "Files or folders to evaluate on; []: valid_share of train");
  list.add("valid_share", data.valid_share,
           "Share of train that is held out for evaluation if valid is [], spread over the data",
           {.least = 0, .most = 0.5});
  list.add("format", data.format, "Format of the files");
  list.add("tokenizer", data.tokenizer,
           "\"bytes\" or a tokenizer.json; encodes text data and decodes samples");
  list.add("chat_template", data.chat_template,
           "Chat template (a .jinja file) for conversations; empty: the tokenizer's");
  list.add("bad_lines", data.bad_lines,
           "A line of a .jsonl file that can't be used stops the run, or is counted and skipped");
  list.add("seq", data.seq, "Tokens per sample", {.least = 1, .most = 1e8});
  list.add("shuffle", data.shuffle, "Shuffle samples; the order depends on the seed and the epoch");
  list.add(
      "packing", data.packing,
      "Fill samples with whole documents, each of which is computed as if it were alone; unless "
      "it is set, it is true for conversations and other JSON lines with a prompt",
      {.only_with = language});
  list.add("document_mask", data.document_mask, "Restrict attention to the same document",
           {.only_with = language});
  list.add("loss_mask", data.loss_mask,
           "Compute the loss only on tokens that FILE.mask next to each token file selects, and in "
           "conversations on what the assistant wrote; unless it is set, it is true if there are "
           "such files");
  list.add("prefetch", data.prefetch, "Batches to load ahead; 0: load each when it is needed",
           {.least = 0, .most = 1024});
}

void check(const DataConfig& data) {
  if (data.is_random() && (data.train.size() > 1 || !data.valid.empty()))
    throw Error("data.train combines \"random\" with other data.",
                "use random tokens alone: data.train = [\"random\"], data.valid = [].");
  if (data.is_random() &&
      (data.format != Format::kAuto || data.loss_mask || data.document_mask || data.packing))
    throw Error(
        "data.train = [\"random\"] reads no files, so a format, packing or mask has no effect.",
        "leave out data.format, data.packing, data.loss_mask and data.document_mask.");
  if (data.packing && data.document_mask)
    throw Error(
        "data.packing keeps attention within documents, so data.document_mask has no effect.",
        "set one of the two.");
  if (data.loss_mask && data.format == Format::kText)
    throw Error("data.loss_mask is for token files and conversations, but data.format is text.",
                "leave out data.format, or write token files with a mask: fsdp tokenize.");
  if (data.has_token_files() && data.train.empty())
    throw Error("data.format = " + enum_name(data.format) + ", but data.train names no file.",
                "pass a token file (fsdp tokenize makes them), or leave out data.format.");
}

}  // namespace fsdp::data
