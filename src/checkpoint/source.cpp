#include "checkpoint/source.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cctype>

#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

// What two rectangles share; nothing if they share no element.
std::optional<Rectangle> overlap(const Rectangle& a, const Rectangle& b) {
  Rectangle both;
  for (size_t d = 0; d < a.offsets.size(); ++d) {
    const int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (begin >= end) return std::nullopt;
    both.offsets.push_back(begin);
    both.sizes.push_back(end - begin);
  }
  return both;
}

int64_t numel_of(const std::vector<int64_t>& sizes) {
  int64_t numel = 1;
  for (int64_t size : sizes) numel *= size;
  return numel;
}

std::vector<int64_t> minus(std::vector<int64_t> a, const std::vector<int64_t>& b) {
  for (size_t d = 0; d < a.size(); ++d) a[d] -= b[d];
  return a;
}

}  // namespace

Source::Source(const std::filesystem::path& dir) : dir_(dir), metadata_(read_metadata(dir)) {}

const TensorEntry* Source::tensor(const std::string& name) const {
  const auto found = metadata_.tensors.find(name);
  return found == metadata_.tensors.end() ? nullptr : &found->second;
}

const files::Input& Source::file(const std::string& name) {
  auto& file = files_[name];
  if (!file) file = std::make_unique<files::Input>(dir_ / name);
  return *file;
}

void Source::check(const std::string& name, const Rectangle& wanted) {
  const TensorEntry& entry = metadata_.tensors.at(name);
  int64_t covered = 0;
  for (const auto& chunk : entry.chunks) {
    const auto both = overlap(wanted, chunk.rectangle);
    if (!both) continue;
    covered += numel_of(both->sizes);
    const auto& holds = file(chunk.place.file);
    if (chunk.place.length > holds.size() || chunk.place.offset > holds.size() - chunk.place.length)
      throw Error(holds.path().string() + ": has " + std::to_string(holds.size()) +
                      " bytes, but \"" + name + "\" needs " +
                      std::to_string(chunk.place.offset + chunk.place.length) + ".",
                  "the file was cut off or not copied to its end; load another checkpoint.");
  }
  if (covered != numel_of(wanted.sizes))
    throw Error((dir_ / ".metadata").string() + ": the parts of \"" + name +
                    "\" that it lists do " + "not make up the whole " + shape_text(entry.sizes) +
                    ".",
                "the checkpoint is damaged; load another one.");
}

const StoredTensor& Source::stored(const std::string& name, const StoredChunk& chunk,
                                   const TensorEntry& entry) {
  const auto key = std::pair(chunk.place.file, chunk.place.offset);
  auto known = stored_.find(key);
  if (known == stored_.end())
    known =
        stored_.emplace(key, find_tensor(file(chunk.place.file), chunk.place, "\"" + name + "\""))
            .first;
  const StoredTensor& found = known->second;
  if (found.sizes != chunk.rectangle.sizes || found.dtype != entry.dtype)
    throw Error((dir_ / chunk.place.file).string() + ": holds another tensor where \"" + name +
                    "\" should be (shape " + shape_text(found.sizes) + " instead of " +
                    shape_text(chunk.rectangle.sizes) + ", or another dtype).",
                "the files are of different checkpoints; load another one.");
  return found;
}

void Source::read(const std::string& name, const Part& part) {
  const TensorEntry& entry = metadata_.tensors.at(name);
  for (const auto& chunk : entry.chunks) {
    const auto both = overlap(part.rectangle, chunk.rectangle);
    if (!both) continue;
    at::Tensor into = part.memory;
    const auto to = minus(both->offsets, part.rectangle.offsets);
    for (int64_t d = 0; d < into.dim(); ++d) into = into.narrow(d, to[d], both->sizes[d]);
    read_part(file(chunk.place.file), stored(name, chunk, entry),
              minus(both->offsets, chunk.rectangle.offsets), into);
  }
}

at::Tensor Source::read_whole(const std::string& name) {
  const TensorEntry& entry = metadata_.tensors.at(name);
  const Rectangle all{std::vector<int64_t>(entry.sizes.size(), 0), entry.sizes};
  check(name, all);
  const Part part = whole(at::empty(entry.sizes, at::TensorOptions().dtype(entry.dtype)));
  read(name, part);
  return part.memory;
}

std::optional<Value> Source::value(const std::string& name) {
  const auto& place = metadata_.values.at(name);
  pickle::Ref found;
  try {
    found = read_value(file(place.file), place, "\"" + name + "\"");
  } catch (const pickle::UnknownClass&) {
    return std::nullopt;
  }
  switch (found->kind) {
    case pickle::Value::kInteger:
      return Value(found->integer);
    case pickle::Value::kBoolean:
      return Value(found->integer != 0);
    case pickle::Value::kReal:
      return Value(found->real);
    case pickle::Value::kString:
      return Value(found->text);
    default:
      return std::nullopt;
  }
}

Extras read_extras(Source& source, int rank, std::vector<std::string>* skipped) {
  constexpr std::string_view kPrefix = "extra.";
  Extras extras;
  const std::string own = "rank" + std::to_string(rank) + ".";
  // Where a name belongs; null for other ranks' and for what is not below "extra.".
  const auto target = [&](const std::string& name) -> std::pair<Extra*, std::string> {
    if (!name.starts_with(kPrefix)) return {nullptr, ""};
    const std::string key = name.substr(kPrefix.size());
    if (key.starts_with(own)) return {&extras.rank, key.substr(own.size())};
    const size_t dot = key.find('.');
    const bool ranks = key.starts_with("rank") && dot != std::string::npos && dot > 4 &&
                       std::all_of(key.begin() + 4, key.begin() + static_cast<int64_t>(dot),
                                   [](unsigned char c) { return std::isdigit(c) != 0; });
    return {ranks ? nullptr : &extras.run, key};
  };
  for (const auto& [name, place] : source.metadata().values) {
    const auto [into, key] = target(name);
    if (!into) continue;
    if (auto value = source.value(name))
      into->emplace(key, std::move(*value));
    else if (skipped)
      skipped->push_back(name);
  }
  for (const auto& [name, entry] : source.metadata().tensors) {
    const auto [into, key] = target(name);
    if (into) into->emplace(key, source.read_whole(name));
  }
  return extras;
}

Extra read_extra(const std::filesystem::path& dir) {
  Source source(dir);
  return read_extras(source, 0, nullptr).run;
}

}  // namespace fsdp::checkpoint
