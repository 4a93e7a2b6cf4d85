// Summary: what a checkpoint holds, read from its lists alone: no element of a tensor is looked at.
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
  int64_t size = -1;  // bytes; -1: it is not there
  int64_t items = 0;  // tensors' parts and values that lie in it
};

struct KindSummary {     // "model", "optim", "extra", or what else names begin with
  int64_t tensors = 0;   // names
  int64_t elements = 0;  // what has several names counts once, here and below
  int64_t bytes = 0;     // of elements
  std::map<std::string, int64_t> dtypes;  // and the bytes of each
};

struct Summary {
  std::filesystem::path dir;
  bool hugging_face = false;
  bool manifest = false;
  std::string saved;  // when, as "2026-03-01 14:05:09" of local time
  int64_t ranks = 0;  // that wrote files; 0 for Hugging Face
  std::vector<FileSummary> files;
  std::map<std::string, KindSummary> kinds;
  Metadata metadata;
  std::map<std::string, std::optional<Value>> values;  // plain ones; none: of an unknown type
  std::vector<std::string> notes;                      // what could not be read, in words
};

// An Error where there is no checkpoint, or its list cannot be read. Damage elsewhere is a note.
Summary summarize(const std::filesystem::path& dir);

// A plain value as people see it: 0.001, true, text as it is.
std::string value_text(const Value& value);

}  // namespace fsdp::checkpoint
