#include "checkpoint/source.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cctype>

#include "base/file_error.h"
#include "base/format.h"
#include "checkpoint/cover.h"
#include "checkpoint/damaged.h"
#include "checkpoint/hugging_face.h"
#include "checkpoint/intact.h"
#include "checkpoint/overlap.h"

namespace fsdp::checkpoint {
namespace {

int64_t bytes_of_part(const TensorEntry& entry, const std::vector<int64_t>& sizes) {
  return capped_product(element_count(sizes), static_cast<int64_t>(c10::elementSize(entry.dtype)));
}

std::vector<int64_t> minus(std::vector<int64_t> a, const std::vector<int64_t>& b) {
  for (size_t d = 0; d < a.size(); ++d) a[d] -= b[d];
  return a;
}

}  // namespace

Source::Source(const std::filesystem::path& dir) : dir_(dir) {
  allow_many_files();  // a checkpoint of a thousand ranks has a thousand files
  if (is_hugging_face(dir) || is_peft(dir)) {
    open_hugging_face();
    return;
  }
  manifest_ = read_manifest(dir);
  std::error_code problem;
  if (!manifest_ || !std::filesystem::exists(dir / kMetadataName, problem)) {
    metadata_ = read_metadata(dir);
  } else {
    const files::Input& held = file(kMetadataName);
    check_metadata_size(held.path(), held.size());
    std::string bytes(static_cast<size_t>(held.size()), '\0');
    held.read(0, bytes.data(), bytes.size());
    metadata_ = decode(bytes, held.path().string());
  }
  require_mark(dir, metadata_, manifest_ ? &*manifest_ : nullptr);
  is_unchecked_ = !manifest_;
  name_wrapped();
  name_state_dict();
}

namespace {

// The matrices of all experts for a product, as parts of one parameter.
struct ExpertsInFiles {
  std::vector<std::pair<Rectangle, ListedTensor>> parts;
  int64_t experts = 0, halves = 1, rows = 0, columns = 0;

  std::vector<int64_t> sizes() const { return {experts, halves * rows, columns}; }

  void add(const ExpertMatrix& matrix, const std::string& name, ListedTensor listed,
           const std::filesystem::path& dir) {
    StoredTensor& stored = listed.stored;
    const bool fits = stored.sizes.size() == 2 &&
                      (parts.empty() || (stored.sizes[0] == rows && stored.sizes[1] == columns &&
                                         stored.dtype == parts.front().second.stored.dtype));
    if (!fits)
      throw Error(formatted("{}: \"{}\" has another shape or dtype than other experts.", dir, name),
                  "the directory is damaged; download it again.");
    rows = stored.sizes[0];
    columns = stored.sizes[1];
    experts = std::max(experts, matrix.expert + 1);
    if (matrix.parameter.ends_with("gate_up_proj")) halves = 2;
    stored.sizes.insert(stored.sizes.begin(), 1);
    stored.strides.insert(stored.strides.begin(), rows * columns);
    parts.push_back({{{matrix.expert, matrix.second ? rows : 0, 0}, stored.sizes}, listed});
  }
};

}  // namespace

// PyTorch's tutorials save {"app": {"model": …, "optim": …}}, and many programs {"model": …,
// "optimizer": …}. Names are as without the outer dict, and "optim" in either case.
void Source::name_wrapped() {
  const auto is = [](const KeyPath& path, size_t place, std::initializer_list<const char*> names) {
    const auto* key = path.size() > place ? std::get_if<std::string>(&path[place]) : nullptr;
    return key && std::find(names.begin(), names.end(), *key) != names.end();
  };
  const auto all = [&](const auto& fits) {
    return !metadata_.tensors.empty() &&
           std::all_of(metadata_.tensors.begin(), metadata_.tensors.end(), [&](const auto& entry) {
             const auto path = metadata_.paths.find(entry.first);
             return path != metadata_.paths.end() && fits(path->second);
           });
  };
  const bool wrapped = all([&](const KeyPath& path) {
    const KeyPath& first = metadata_.paths.at(metadata_.tensors.begin()->first);
    return path.size() > 2 && path[0] == first[0] &&
           !is(path, 0, {"model", "optim", "optimizer"}) &&
           is(path, 1, {"model", "optim", "optimizer"});
  });
  const size_t outer = wrapped ? 1 : 0;
  const bool renamed = all([&](const KeyPath& path) {
    return is(path, outer, {"model", "optimizer"});
  });
  if (!wrapped && !renamed) return;
  const auto rename = [&](auto& entries) {
    std::remove_reference_t<decltype(entries)> named;
    for (auto& [name, entry] : entries) {
      const auto known = metadata_.paths.find(name);
      KeyPath path = known == metadata_.paths.end() ? KeyPath{name} : known->second;
      const KeyPath whole = path;
      if (path.size() > outer) path.erase(path.begin(), path.begin() + static_cast<int64_t>(outer));
      if (is(path, 0, {"optimizer"})) path[0] = "optim";
      const std::string usual = Metadata::name(path);
      metadata_.paths[usual] = whole;
      named.emplace(usual, std::move(entry));
    }
    entries = std::move(named);
  };
  rename(metadata_.tensors);
  rename(metadata_.values);
}

// dcp.save(model.state_dict()) nests nothing: {"model.embed_tokens.weight": …, "lm_head.weight": …}
// is a Llama of transformers, not a part of it.
void Source::name_state_dict() {
  const auto is_nested = [&](const std::string& name) {
    const auto path = metadata_.paths.find(name);
    if (path != metadata_.paths.end() && !path->second.empty()) return path->second.size() > 1;
    return name.starts_with("model.") || name.starts_with("optim.") || name.starts_with("extra.");
  };
  // Without any path, one name outside of ours tells.
  const bool known =
      std::any_of(metadata_.tensors.begin(), metadata_.tensors.end(),
                  [&](const auto& entry) { return metadata_.paths.contains(entry.first); });
  const auto nested = [&](const auto& entry) { return is_nested(entry.first); };
  const auto& tensors = metadata_.tensors;
  is_state_dict_ =
      !tensors.empty() && (known ? std::none_of(tensors.begin(), tensors.end(), nested)
                                 : !std::all_of(tensors.begin(), tensors.end(), nested));
  if (!is_state_dict_) return;
  std::map<std::string, TensorEntry> named;
  for (auto& [name, entry] : metadata_.tensors) {
    metadata_.paths["model." + name] = {name};
    named.emplace("model." + name, std::move(entry));
  }
  metadata_.tensors = std::move(named);
}

void Source::open_hugging_face() {
  std::map<std::string, ExpertsInFiles> experts;  // by parameter
  const auto add = [&](const std::string& name, const ListedTensor& listed,
                       const std::vector<int64_t>& sizes, const Rectangle& rectangle) {
    const ItemPlace place{listed.file, listed.stored.offset, listed.bytes};
    metadata_.add_chunk({"model", name}, listed.stored.dtype, sizes, {rectangle, place});
    // An empty tensor shares its offset with the next one and is never read.
    if (listed.bytes > 0) stored_.emplace(std::pair(place.file, place.offset), listed.stored);
  };
  for (auto& [name, listed] : list_hugging_face(dir_).tensors) {
    if (const auto matrix = expert_matrix(name)) {
      experts[matrix->parameter].add(*matrix, name, std::move(listed), dir_);
    } else {
      add(name, listed, listed.stored.sizes, everything(listed.stored.sizes));
    }
  }
  for (const auto& [name, fused] : experts)
    for (const auto& [rectangle, listed] : fused.parts) add(name, listed, fused.sizes(), rectangle);
}

const TensorEntry* Source::tensor(const std::string& name) const {
  const auto found = metadata_.tensors.find(name);
  return found == metadata_.tensors.end() ? nullptr : &found->second;
}

const files::Input& Source::file(const std::string& name) {
  auto& file = files_[name];
  if (file) return *file;
  const FileSums* sums = nullptr;
  if (manifest_) {
    const auto found = manifest_->files.find(name);
    if (found == manifest_->files.end())
      throw Damaged(formatted("{}: is not in the checkpoint's manifest.", dir_ / name),
                    "the files belong to different checkpoints; load another one.");
    sums = &found->second;
  }
  file = std::make_unique<files::Input>(dir_ / name, sums);
  return *file;
}

void Source::check(const std::string& name, const Rectangle& wanted) {
  const TensorEntry& entry = metadata_.tensors.at(name);
  if (covered_.insert(name).second)
    if (const std::string problem = cover_problem(entry); !problem.empty())
      throw Error(formatted("{}: \"{}\" {}.", dir_ / kMetadataName, name, problem),
                  "the checkpoint is damaged; load another one.");
  for (const auto& chunk : entry.chunks) {
    if (!overlap_of(wanted, chunk.rectangle)) continue;
    if (noted_) {
      noted_->insert(chunk.place.file);
      continue;
    }
    const auto& holds = file(chunk.place.file);
    if (chunk.place.length > holds.size() || chunk.place.offset > holds.size() - chunk.place.length)
      throw Damaged(formatted("{}: has {} bytes, but \"{}\" needs {}.", holds.path(), holds.size(),
                              name, chunk.place.offset + chunk.place.length),
                    "the file was truncated or copied incompletely; load another checkpoint.");
    // Memory is taken for the tensor before its elements are read.
    const int64_t bytes = bytes_of_part(entry, chunk.rectangle.sizes);
    if (bytes > chunk.place.length)
      throw Damaged(
          formatted("{}: \"{}\" needs {} bytes for its part {}, but {} are stored.", holds.path(),
                    name, bytes, shape_text(chunk.rectangle.sizes), chunk.place.length),
          "the checkpoint is damaged; load another one.");
  }
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
    throw Error(formatted("{}: holds a different tensor where \"{}\" should be (shape {} instead "
                          "of {}, or another dtype).",
                          dir_ / chunk.place.file, name, shape_text(found.sizes),
                          shape_text(chunk.rectangle.sizes)),
                "the files belong to different checkpoints; load another one.");
  return found;
}

void Source::read(const std::string& name, const Part& part) {
  const TensorEntry& entry = metadata_.tensors.at(name);
  for (const auto& chunk : entry.chunks) {
    const auto both = overlap_of(part.rectangle, chunk.rectangle);
    if (!both) continue;
    at::Tensor into = part.memory;
    const auto to = minus(both->offsets, part.rectangle.offsets);
    for (int64_t d = 0; d < into.dim(); ++d) into = into.narrow(d, to[d], both->sizes[d]);
    try {
      read_part(file(chunk.place.file), stored(name, chunk, entry),
                minus(both->offsets, chunk.rectangle.offsets), into, blocks_);
    } catch (const Error& problem) {  // names the file, perhaps not the tensor
      if (problem.message().find(name) != std::string::npos) throw;
      const std::string text = formatted("\"{}\" can't be read: {}", name, problem.message());
      if (dynamic_cast<const Damaged*>(&problem)) throw Damaged(text, problem.hint());
      throw Error(text, problem.hint());
    }
  }
}

at::Tensor Source::read_whole(const std::string& name) {
  const TensorEntry& entry = metadata_.tensors.at(name);
  check(name, everything(entry.sizes));
  const Part part = whole(at::empty(entry.sizes, at::TensorOptions().dtype(entry.dtype)));
  read(name, part);
  return part.memory;
}

pickle::Ref Source::plain(const std::string& name) {
  const auto& place = metadata_.values.at(name);
  try {
    return read_value(file(place.file), place, "\"" + name + "\"");
  } catch (const pickle::UnknownClass&) {
    return nullptr;
  }
}

std::optional<Value> Source::value(const std::string& name) {
  const pickle::Ref found = plain(name);
  if (!found) return std::nullopt;
  switch (found->kind) {
    case pickle::kInteger:
      return Value(found->integer);
    case pickle::kBoolean:
      return Value(found->integer != 0);
    case pickle::kReal:
      return Value(found->real);
    case pickle::kString:
      return Value(found->text);
    default:
      return std::nullopt;
  }
}

Extras read_extras(Source& source, int rank, std::vector<std::string>* skipped) {
  constexpr std::string_view kPrefix = "extra.";
  Extras extras;
  const std::string own = formatted("rank{}.", rank);
  // Where a name belongs; null for other ranks' values and for names not below "extra.".
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
