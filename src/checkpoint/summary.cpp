#include "checkpoint/summary.h"

#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <ctime>
#include <set>
#include <tuple>

#include "checkpoint/dtype.h"
#include "checkpoint/hugging_face.h"
#include "checkpoint/manifest.h"
#include "checkpoint/overlap.h"
#include "checkpoint/source.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

namespace fs = std::filesystem;

// When a file was last written; "" if it doesn't exist.
std::string time_of(const fs::path& file) {
  struct stat found {};
  if (stat(file.c_str(), &found) != 0) return "";
  std::tm parts{};
  char text[32];
  if (!localtime_r(&found.st_mtime, &parts) ||
      std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &parts) == 0)
    return "";
  return text;
}

// The rank in "__3_0.distcp"; none in other names.
std::optional<int64_t> rank_in(const std::string& name) {
  if (!name.starts_with("__") || !name.ends_with(".distcp")) return std::nullopt;
  int64_t rank = 0;
  const auto [end, problem] = std::from_chars(name.data() + 2, name.data() + name.size(), rank);
  if (problem != std::errc() || *end != '_' || rank < 0) return std::nullopt;
  return rank;
}

void add_files(Summary& summary) {
  std::map<std::string, int64_t> items;  // by file
  std::set<std::tuple<std::string, int64_t>> seen;
  const auto use = [&](const ItemPlace& place) {
    if (seen.emplace(place.file, place.offset).second) ++items[place.file];
  };
  for (const auto& [name, entry] : summary.metadata.tensors)
    for (const auto& chunk : entry.chunks) use(chunk.place);
  for (const auto& [name, place] : summary.metadata.values) use(place);
  std::set<int64_t> ranks;
  std::error_code problem;
  if (!summary.hugging_face)  // a rank with nothing to write leaves an empty file
    for (const auto& file : fs::directory_iterator(summary.dir, problem))
      items.try_emplace(file.path().filename().string(), 0);
  for (const auto& [name, count] : items) {
    const auto size = fs::file_size(summary.dir / name, problem);
    summary.files.push_back({name, problem ? -1 : static_cast<int64_t>(size), count});
    if (const auto rank = rank_in(name)) ranks.insert(*rank);
  }
  summary.ranks = static_cast<int64_t>(ranks.size());
}

void add_kinds(Summary& summary) {
  // The names of one tensor have the same places.
  std::set<std::vector<std::tuple<std::string, int64_t>>> seen;
  for (const auto& [name, entry] : summary.metadata.tensors) {
    auto& kind = summary.kinds[name.substr(0, name.find('.'))];
    kind.tensors += 1;
    std::vector<std::tuple<std::string, int64_t>> places;
    for (const auto& chunk : entry.chunks)
      places.emplace_back(chunk.place.file, chunk.place.offset);
    if (element_count(entry.sizes) > 0 && !seen.insert(std::move(places)).second) continue;
    const int64_t elements = element_count(entry.sizes);
    const int64_t bytes = elements * static_cast<int64_t>(c10::elementSize(entry.dtype));
    auto& of_dtype = kind.dtypes[dtype_name(entry.dtype)];
    kind.elements = capped_sum(kind.elements, elements);
    kind.bytes = capped_sum(kind.bytes, bytes);
    of_dtype = capped_sum(of_dtype, bytes);
  }
}

void add_values(Summary& summary, Source& source) {
  for (const auto& [name, place] : summary.metadata.values) {
    try {
      summary.values[name] = source.value(name);
    } catch (const Error& error) {
      summary.notes.push_back(error.message());
    }
  }
}

}  // namespace

Summary summarize(const fs::path& dir) {
  Summary summary{.dir = dir};
  std::error_code problem;
  summary.hugging_face = !fs::exists(dir / kMetadataName, problem) && is_hugging_face(dir);
  if (summary.hugging_face) {
    summary.metadata = Source(dir).metadata();
    for (const char* name : {kWeightsIndex, kWeightsFile, "config.json"})
      if (summary.saved.empty()) summary.saved = time_of(dir / name);
  } else {
    summary.metadata = read_metadata(dir);
    summary.saved = time_of(dir / kMetadataName);
    summary.manifest = fs::exists(dir / kManifestName, problem);
    try {
      Source source(dir);
      add_values(summary, source);
    } catch (const Error& error) {
      summary.notes.push_back(error.message());
    }
  }
  add_files(summary);
  add_kinds(summary);
  return summary;
}

std::string value_text(const Value& value) {
  if (const auto* integer = std::get_if<int64_t>(&value)) return std::to_string(*integer);
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* text = std::get_if<std::string>(&value)) return *text;
  if (const auto* real = std::get_if<double>(&value)) {
    char text[64];  // the shortest text that reads back as the same number
    return {text, std::to_chars(text, text + sizeof text, *real).ptr};
  }
  return "a tensor";
}

}  // namespace fsdp::checkpoint
