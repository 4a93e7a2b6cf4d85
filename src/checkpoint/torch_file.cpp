#include "checkpoint/torch_file.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/format.h"
#include "checkpoint/zip.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

constexpr size_t kMostKeys = 32;          // keys that lead to a value
constexpr int64_t kMostValues = 1 << 20;  // in one plain value; shared values are written again

// A node of the nested dicts and lists: a branch, or a leaf with its name in the checkpoint's
// metadata.
struct Node {
  std::map<std::string, Node> keys;
  std::map<int64_t, Node> items;
  std::string leaf;
};

struct Leaf {       // how a leaf is written
  std::string key;  // of the storage of a tensor; empty: a plain value
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  pickle::Ref value;
};

KeyPath path_of(const Metadata& metadata, const std::string& name) {
  const auto found = metadata.paths.find(name);
  if (found != metadata.paths.end() && !found->second.empty()) return found->second;
  if (name.starts_with("model.")) return {std::string("model"), name.substr(6)};
  return {name};
}

void place(Node& root, const KeyPath& path, const std::string& name, const std::string& where) {
  const auto refuse = [&](const char* what) {
    throw Error(formatted("{}: \"{}\" {}.", where, name, what),
                "the checkpoint is damaged, or another program wrote it with a different nesting.");
  };
  if (path.size() > kMostKeys) refuse("is nested too deeply");
  Node* at = &root;
  for (const auto& step : path) {
    if (!at->leaf.empty()) refuse("is nested inside of a value");
    if (const auto* key = std::get_if<std::string>(&step)) {
      if (!at->items.empty()) refuse("would be a key of a list");
      at = &at->keys[*key];
    } else {
      if (!at->keys.empty()) refuse("would be an item of a dict");
      at = &at->items[std::get<int64_t>(step)];
    }
  }
  if (!at->leaf.empty() || !at->keys.empty() || !at->items.empty())
    refuse("has the same path as another entry");
  at->leaf = name;
}

// Whether torch.load(weights_only=True) and our writer support the value; `budget` limits its size:
// one value may be in it many times.
bool is_plain(const pickle::Pickled& value, int64_t& budget) {
  budget -= 1 + static_cast<int64_t>(value.text.size()) / 16;
  if (budget < 0) return false;
  switch (value.kind) {
    case pickle::kNone:
    case pickle::kBoolean:
    case pickle::kInteger:
    case pickle::kReal:
    case pickle::kString:
      return true;
    case pickle::kList:
    case pickle::kTuple:
    case pickle::kDict:
      for (const auto& item : value.items)
        if (!is_plain(*item, budget)) return false;
      return true;
    default:
      return false;
  }
}

void put_pickled(pickle::Writer& writer, const pickle::Pickled& value) {
  const auto put_items = [&] {
    writer.mark();
    for (const auto& item : value.items) put_pickled(writer, *item);
  };
  switch (value.kind) {
    case pickle::kBoolean:
      return writer.boolean(value.integer != 0);
    case pickle::kInteger:
      return writer.integer(value.integer);
    case pickle::kReal:
      return writer.real(value.real);
    case pickle::kString:
      return writer.string(value.text);
    case pickle::kList:
      writer.empty_list();
      put_items();
      return writer.append_all();
    case pickle::kTuple:
      put_items();
      return writer.tuple();
    case pickle::kDict:
      writer.empty_dict();
      put_items();
      return writer.set_all();
    default:
      return writer.none();
  }
}

std::vector<int64_t> row_major(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d > 1; --d)
    strides[d - 2] = strides[d - 1] * std::max<int64_t>(1, sizes[d - 1]);
  return strides;
}

void put_leaf(pickle::Writer& writer, const Leaf& leaf) {
  if (leaf.key.empty()) return put_pickled(writer, *leaf.value);
  put_tensor(writer, leaf.dtype, leaf.sizes, row_major(leaf.sizes), leaf.key);
}

void put_node(pickle::Writer& writer, const Node& node, const std::map<std::string, Leaf>& leaves) {
  if (!node.leaf.empty()) return put_leaf(writer, leaves.at(node.leaf));
  if (node.items.empty()) {
    writer.empty_dict();
    writer.mark();
    for (const auto& [key, child] : node.keys) {
      writer.string(key);
      put_node(writer, child, leaves);
    }
    return writer.set_all();
  }
  writer.empty_list();
  writer.mark();
  int64_t next = 0;
  for (const auto& [index, child] : node.items) {
    for (; next < index; ++next) writer.none();  // values that were left out
    put_node(writer, child, leaves);
    ++next;
  }
  writer.append_all();
}

// Values that are left out make gaps in lists, `most` in all. The check keeps invalid indices from
// making lists of arbitrary length.
void check_lists(const Node& node, int64_t& most, const std::string& where) {
  for (const auto& [key, child] : node.keys) check_lists(child, most, where);
  int64_t next = 0;
  for (const auto& [index, child] : node.items) {
    if (index < next || index - next > most)
      throw Error(
          formatted("{}: has an item {} in a list, but fewer values than that.", where, index),
          "the checkpoint is damaged; use another one.");
    most -= index - next;
    next = index + 1;
    check_lists(child, most, where);
  }
}

}  // namespace

TorchFile::TorchFile(Source& source, const TorchFileOptions& options) : source_(source) {
  const Metadata& metadata = source.metadata();
  const std::string where = (source.dir() / kMetadataName).string();
  const auto wanted = [&](const std::string& name) {
    return !options.model_only || name.starts_with("model.");
  };
  std::vector<std::string> names;
  for (const auto& [name, entry] : metadata.tensors)
    if (wanted(name)) names.push_back(name);

  std::map<std::string, Leaf> leaves;
  check_amount(source, names);
  for (const auto& group : by_bytes(source, names)) {
    // Tied parameters share one storage. Only parameters are converted.
    const TensorEntry& entry = metadata.tensors.at(group.front());
    const bool model = group.front().starts_with("model.");
    const auto dtype = model ? converted(entry.dtype, options.dtype) : entry.dtype;
    const std::string key = std::to_string(storages_.size());
    storages_.push_back({group.front(), key, dtype});
    for (const auto& name : group) leaves[name] = {key, dtype, entry.sizes, nullptr};
  }
  for (const auto& [name, place] : metadata.values) {
    if (!wanted(name)) continue;
    int64_t budget = kMostValues;
    if (auto value = source.plain(name); value && is_plain(*value, budget))
      leaves[name] = {"", at::kFloat, {}, std::move(value)};
    else
      left_out_.push_back(name);
  }

  Node root;
  for (const auto& [name, leaf] : leaves) place(root, path_of(metadata, name), name, where);
  auto gaps = static_cast<int64_t>(metadata.tensors.size() + metadata.values.size());
  check_lists(root, gaps, where);
  const Node* top = &root;
  if (options.model_only && !source.is_state_dict()) {
    const auto model = root.keys.find("model");
    if (model == root.keys.end() || !model->second.leaf.empty())
      throw Error(formatted("{}: holds no model.", source.dir()),
                  "pass a checkpoint with tensors named \"model.NAME\".");
    top = &model->second;
  }
  pickle::Writer writer;
  put_node(writer, *top, leaves);
  pickled_ = writer.finish();
}

int64_t TorchFile::bytes() const {
  return bytes_of(source_, storages_);
}

void TorchFile::write(const std::filesystem::path& path, const Advance& advance) const {
  constexpr int64_t kAround = 256;  // approximate bytes of a record without its data
  files::Output out(path, bytes() + static_cast<int64_t>(pickled_.size()) +
                              static_cast<int64_t>(storages_.size() + 8) * kAround);
  ArchiveWriter archive(out);
  archive.add("data.pkl", pickled_);
  uint64_t identity = archive.last_sum();
  archive.add(".format_version", "1");
  archive.add(".storage_alignment", std::to_string(kRecordAlignment));
  archive.add("byteorder", "little");
  for (const auto& storage : storages_) {
    archive.begin("data/" + storage.to, bytes_of(source_, storage));
    stream_bytes(
        source_, storage, [&](const void* bytes, size_t size) { archive.data(bytes, size); },
        advance);
    archive.end();
    identity = identity * 31 + archive.last_sum();
  }
  archive.add("version", "3\n");
  archive.add(".data/serialization_id", zero_padded(identity, 40));
  archive.finish();
  out.close();
}

}  // namespace fsdp::checkpoint
