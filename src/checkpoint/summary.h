// Summary: what a checkpoint holds, without reading any elements of tensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/metadata.h"
#include "fsdp/checkpoint.h"

namespace fsdp::checkpoint {

struct FileSummary {
  std::string name;
  int64_t size = -1;  // bytes; -1: missing
  int64_t items = 0;  // parts of tensors and values in it
};

struct KindSummary {                      // of "model", "optim", "extra" or another prefix of names
  int64_t tensors = 0;                    // names
  int64_t elements = 0;                   // a tensor with several names counts once, here and below
  int64_t bytes = 0;                      // of elements
  std::map<std::string, int64_t> dtypes;  // bytes per dtype
};

struct Summary {
  std::filesystem::path dir;
  bool hugging_face = false;
  bool manifest = false;
  std::string saved;  // local time, "2026-03-01 14:05:09"
  int64_t ranks = 0;  // that wrote files; 0 for Hugging Face
  std::vector<FileSummary> files;
  std::map<std::string, KindSummary> kinds;
  Metadata metadata;
  std::map<std::string, std::optional<Value>> values;  // plain ones; nullopt: unknown type
  std::vector<std::string> notes;                      // what couldn't be read
};

// An Error if there is no checkpoint or its metadata can't be read. Damage elsewhere is a note.
Summary summarize(const std::filesystem::path& dir);

// A plain value as text: 0.001, true, strings unchanged.
std::string value_text(const Value& value);

}  // namespace fsdp::checkpoint
