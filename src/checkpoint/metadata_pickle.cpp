// Metadata as a pickle and back: the classes of torch.distributed.checkpoint.metadata.
#include <algorithm>
#include <optional>
#include <utility>

#include "base/format.h"
#include "checkpoint/dtype.h"
#include "checkpoint/metadata.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

const std::string kModule = "torch.distributed.checkpoint.metadata";
const std::string kFiles = "torch.distributed.checkpoint.filesystem";

bool allowed_in_metadata(const std::string& name) {
  static const std::vector<std::string> kNames = {
      kModule + ".Metadata",
      kModule + ".TensorStorageMetadata",
      kModule + ".BytesStorageMetadata",
      kModule + ".ChunkStorageMetadata",
      kModule + ".TensorProperties",
      kModule + ".MetadataIndex",
      kModule + ".StorageMeta",
      kModule + "._MEM_FORMAT_ENCODING",
      kFiles + "._StorageInfo",
      "torch.Size",
      "torch.serialization._get_layout",
      "collections.OrderedDict",
      "pathlib.PosixPath",  // the path where the checkpoint was written
      "pathlib.PurePosixPath",
      "pathlib.WindowsPath",
      "pathlib._local.PosixPath",
      "pathlib._local.WindowsPath",
  };
  if (std::find(kNames.begin(), kNames.end(), name) != kNames.end()) return true;
  return name.starts_with("torch.") && dtype_of(name.substr(6));
}

// --- writing ---

// An object whose state is a dict; `fields` writes its keys and values.
template <typename Fields>
void put_object(pickle::Writer& writer, const std::string& module, const std::string& name,
                Fields fields) {
  writer.global(module, name);
  writer.empty_tuple();
  writer.new_object();
  writer.empty_dict();
  writer.mark();
  fields();
  writer.set_all();
  writer.build();
}

void put_size(pickle::Writer& writer, const std::vector<int64_t>& sizes) {
  writer.global("torch", "Size");
  writer.mark();
  writer.mark();
  for (int64_t size : sizes) writer.integer(size);
  writer.tuple();
  writer.tuple();
  writer.call();
}

void put_properties(pickle::Writer& writer, at::ScalarType dtype) {
  writer.global(kModule, "TensorProperties");
  writer.empty_tuple();
  writer.new_object();
  writer.mark();
  writer.global("torch", dtype_name(dtype));
  writer.global("torch.serialization", "_get_layout");
  writer.mark();
  writer.string("torch.strided");
  writer.tuple();
  writer.call();
  writer.boolean(false);  // requires_grad
  writer.global(kModule, "_MEM_FORMAT_ENCODING");
  writer.mark();
  writer.integer(0);  // contiguous
  writer.tuple();
  writer.call();
  writer.boolean(false);  // pin_memory
  writer.tuple();
  writer.build();
}

void put_tensor_entry(pickle::Writer& writer, const TensorEntry& entry) {
  put_object(writer, kModule, "TensorStorageMetadata", [&] {
    writer.string("properties");
    put_properties(writer, entry.dtype);
    writer.string("size");
    put_size(writer, entry.sizes);
    writer.string("chunks");
    writer.empty_list();
    writer.mark();
    for (const auto& chunk : entry.chunks)
      put_object(writer, kModule, "ChunkStorageMetadata", [&] {
        writer.string("offsets");
        put_size(writer, chunk.rectangle.offsets);
        writer.string("sizes");
        put_size(writer, chunk.rectangle.sizes);
      });
    writer.append_all();
  });
}

// A key of storage_data and its value.
void put_place(pickle::Writer& writer, const std::string& name, const std::vector<int64_t>* offsets,
               int64_t index, const ItemPlace& place) {
  put_object(writer, kModule, "MetadataIndex", [&] {
    writer.string("fqn");
    writer.string(name);
    writer.string("index");
    if (!offsets) return writer.none();
    writer.integer(index);
    writer.string("offset");
    put_size(writer, *offsets);
  });
  put_object(writer, kFiles, "_StorageInfo", [&] {
    writer.string("relative_path");
    writer.string(place.file);
    writer.string("offset");
    writer.integer(place.offset);
    writer.string("length");
    writer.integer(place.length);
  });
}

// The id of a save, which DCP leaves to whoever writes.
void put_mark(pickle::Writer& writer, const std::string& mark) {
  put_object(writer, kModule, "StorageMeta", [&] {
    writer.string("checkpoint_id");
    writer.none();
    writer.string("save_id");
    writer.string(mark);
    writer.string("load_id");
    writer.none();
    writer.string("modules");
    writer.empty_list();
  });
}

void put_path(pickle::Writer& writer, const KeyPath& path) {
  writer.mark();
  for (const auto& step : path) {
    if (std::holds_alternative<std::string>(step))
      writer.string(std::get<std::string>(step));
    else
      writer.integer(std::get<int64_t>(step));
  }
  writer.tuple();
}

// --- reading ---

// Values may be shared within a pickle, so a small file could cause any number of copies. The
// limits on copies are ones that no honest file reaches.
constexpr size_t kMostFields = 64;           // of an object
constexpr size_t kMostChunkDimensions = 64;  // of a tensor
constexpr size_t kLongestFile = 255;         // a name
constexpr size_t kLongestName = 4096;        // of a tensor or value
constexpr size_t kSmallestChunk = 32;        // bytes that a chunk and its place take in the file

// What an error is about. Its text is only made for an error.
struct About {
  const char* what = "";
  std::optional<std::string_view> name = {};
  std::string text() const { return name ? formatted("{}\"{}\"", what, *name) : what; }
};

class Decoder {
 public:
  Decoder(std::string_view bytes, const std::string& where)
      : where_(where),
        chunks_left_(bytes.size() / kSmallestChunk),
        steps_left_(bytes.size()),
        root_(pickle::read(bytes, where, allowed_in_metadata)) {}

  Metadata run() {
    const pickle::Pickled& root = state(*root_, kModule + ".Metadata", {"the root object"});
    read_places(field(root, "storage_data", pickle::kDict, {"the root object"}));
    read_entries(field(root, "state_dict_metadata", pickle::kDict, {"the root object"}));
    const pickle::Pickled* paths = root.find("planner_data");
    if (paths && paths->is(pickle::kDict)) read_paths(*paths);
    read_mark(root.find("storage_meta"));
    return std::move(metadata_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(formatted("{}: {}.", where_, what),
                "the file is damaged, or from a version of torch.distributed.checkpoint with "
                "another format.");
  }

  const pickle::Pickled& state(const pickle::Pickled& object, std::string_view name,
                               const About& of) const {
    if (!object.is(pickle::kObject) || object.text != name || !object.state)
      fail(formatted("{} isn't a {}", of.text(), name));
    if (object.state->items.size() > 2 * kMostFields)
      fail(formatted("{} has too many fields", of.text()));
    return *object.state;
  }

  const pickle::Pickled& field(const pickle::Pickled& dict, const char* key,
                               pickle::PickledKind kind, const About& of) const {
    const pickle::Pickled* found = dict.find(key);
    if (!found) fail(formatted("{} has no \"{}\"", of.text(), key));
    if (!found->is(kind))
      fail(formatted("{}: \"{}\" isn't of type {}", of.text(), key, pickle::name(kind)));
    return *found;
  }

  const std::string& checked_name(const std::string& name) const {
    if (name.size() > kLongestName)
      fail(formatted("\"{}…\" is a name of {} bytes", name.substr(0, 40), name.size()));
    return name;
  }

  std::vector<int64_t> size(const pickle::Pickled* value, const About& of) const {
    if (!value || !value->is(pickle::kObject) || value->text != "torch.Size" ||
        value->arguments().size() > 1)
      fail(formatted("{} has no size", of.text()));
    std::vector<int64_t> sizes;
    if (value->arguments().empty()) return sizes;
    if (!value->arguments()[0]->is(pickle::kTuple)) fail(formatted("{} has no size", of.text()));
    if (value->arguments()[0]->items.size() > kMostChunkDimensions)
      fail(formatted("{} has more than {} dimensions", of.text(), kMostChunkDimensions));
    for (const auto& item : value->arguments()[0]->items) {
      if (!item->is(pickle::kInteger) || item->integer < 0)
        fail(formatted("{} has a size below zero", of.text()));
      sizes.push_back(item->integer);
    }
    return sizes;
  }

  void read_places(const pickle::Pickled& places) {
    for (size_t i = 0; i < places.items.size(); i += 2) {
      const pickle::Pickled& index =
          state(*places.items[i], kModule + ".MetadataIndex", {"a storage index"});
      const std::string& name =
          checked_name(field(index, "fqn", pickle::kString, {"a storage index"}).text);
      const pickle::Pickled* offset = index.find("offset");
      const bool whole = !offset || offset->is(pickle::kNone);
      Offsets offsets = whole ? Offsets{} : size(offset, {"", name});
      places_[{name, std::move(offsets)}] = place(*places.items[i + 1], name);
    }
  }

  ItemPlace place(const pickle::Pickled& value, const std::string& name) const {
    const About of{"the place of ", name};
    const pickle::Pickled& info = state(value, kFiles + "._StorageInfo", of);
    ItemPlace found{field(info, "relative_path", pickle::kString, of).text,
                    field(info, "offset", pickle::kInteger, of).integer,
                    field(info, "length", pickle::kInteger, of).integer};
    if (found.file.size() > kLongestFile)
      fail(formatted("{} has a file name that is too long", of.text()));
    if (found.file.empty() || found.file == "." || found.file == ".." ||
        found.file.find('/') != std::string::npos || found.file.find('\0') != std::string::npos)
      fail(formatted("{} is the file \"{}\", which is outside of the checkpoint", of.text(),
                     found.file));
    if (found.offset < 0 || found.length < 0) fail(formatted("{} is negative", of.text()));
    const pickle::Pickled* changed = info.find("transform_descriptors");
    if (changed && !changed->is(pickle::kNone) && !changed->items.empty())
      fail(formatted("\"{}\" is stored compressed or otherwise transformed", name));
    return found;
  }

  void read_entries(const pickle::Pickled& entries) {
    for (size_t i = 0; i < entries.items.size(); i += 2) {
      if (!entries.items[i]->is(pickle::kString)) fail("a name isn't a string");
      const std::string& name = checked_name(entries.items[i]->text);
      const pickle::Pickled& entry = *entries.items[i + 1];
      if (!entry.is(pickle::kObject)) fail(formatted("\"{}\" is of an unknown kind", name));
      if (entry.text == kModule + ".BytesStorageMetadata")
        metadata_.values[name] = find_place(name, {});
      else
        metadata_.tensors.insert_or_assign(name, tensor(name, entry));
    }
  }

  ItemPlace find_place(const std::string& name, const std::vector<int64_t>& offsets) const {
    const auto found = places_.find({name, offsets});
    if (found == places_.end())
      fail(formatted("\"{}\" is stored nowhere (its part at {})", name, shape_text(offsets)));
    return found->second;
  }

  TensorEntry tensor(const std::string& name, const pickle::Pickled& value) {
    const About of{"", name};
    const pickle::Pickled& fields = state(value, kModule + ".TensorStorageMetadata", of);
    TensorEntry entry{dtype(field(fields, "properties", pickle::kObject, of), of),
                      size(fields.find("size"), of),
                      {}};
    int64_t bytes = static_cast<int64_t>(c10::elementSize(entry.dtype));
    for (int64_t extent : entry.sizes)
      if (__builtin_mul_overflow(bytes, std::max<int64_t>(extent, 1), &bytes))
        fail(formatted("{} is impossibly large", of.text()));
    const pickle::Pickled& chunks = field(fields, "chunks", pickle::kList, of);
    if (chunks.items.size() > chunks_left_) fail("it has more chunks than its size allows");
    chunks_left_ -= chunks.items.size();
    for (const auto& item : chunks.items) {
      const pickle::Pickled& chunk = state(*item, kModule + ".ChunkStorageMetadata", of);
      Rectangle rectangle{size(chunk.find("offsets"), of), size(chunk.find("sizes"), of)};
      check_bounds(rectangle, entry.sizes, of);
      ItemPlace place = find_place(name, rectangle.offsets);
      entry.chunks.push_back({std::move(rectangle), std::move(place)});
    }
    return entry;
  }

  at::ScalarType dtype(const pickle::Pickled& properties, const About& of) const {
    const pickle::Pickled& fields = state(properties, kModule + ".TensorProperties", of);
    if (!fields.is(pickle::kTuple) || fields.items.empty() ||
        !fields.items[0]->is(pickle::kClass) || !fields.items[0]->text.starts_with("torch."))
      fail(formatted("{} has no dtype", of.text()));
    const auto type = dtype_of(fields.items[0]->text.substr(6));
    if (!type) fail(formatted("{} has no dtype", of.text()));
    return *type;
  }

  void check_bounds(const Rectangle& rectangle, const std::vector<int64_t>& sizes,
                    const About& of) const {
    bool inside =
        rectangle.offsets.size() == sizes.size() && rectangle.sizes.size() == sizes.size();
    for (size_t d = 0; inside && d < sizes.size(); ++d)
      inside =
          rectangle.sizes[d] <= sizes[d] && rectangle.offsets[d] <= sizes[d] - rectangle.sizes[d];
    if (!inside)
      fail(formatted("{} of shape {} has a part {} at {}", of.text(), shape_text(sizes),
                     shape_text(rectangle.sizes), shape_text(rectangle.offsets)));
  }

  void read_paths(const pickle::Pickled& paths) {
    for (size_t i = 0; i < paths.items.size(); i += 2) {
      if (!paths.items[i]->is(pickle::kString) || !paths.items[i + 1]->is(pickle::kTuple)) continue;
      checked_name(paths.items[i]->text);
      KeyPath path;
      for (const auto& step : paths.items[i + 1]->items) {
        // The steps of a path, joined, are its name, which is in the file.
        if (step->text.size() + 1 > steps_left_) fail("it has longer paths than its size allows");
        steps_left_ -= step->text.size() + 1;
        if (step->is(pickle::kString)) path.emplace_back(step->text);
        if (step->is(pickle::kInteger)) path.emplace_back(step->integer);
      }
      metadata_.paths[paths.items[i]->text] = std::move(path);
    }
  }

  void read_mark(const pickle::Pickled* meta) {
    if (!meta || !meta->is(pickle::kObject) || !meta->state) return;
    const pickle::Pickled* id = meta->state->find("save_id");
    if (id && id->is(pickle::kString) && id->text.starts_with(kMarkPrefix))
      metadata_.mark = id->text;
  }

  using Offsets = std::vector<int64_t>;
  const std::string& where_;
  size_t chunks_left_, steps_left_;
  pickle::Ref root_;
  std::map<std::pair<std::string_view, Offsets>, ItemPlace> places_;  // names are in root_
  Metadata metadata_;
};

}  // namespace

std::string encode(const Metadata& metadata) {
  pickle::Writer writer;
  put_object(writer, kModule, "Metadata", [&] {
    writer.string("state_dict_metadata");
    writer.empty_dict();
    writer.mark();
    for (const auto& [name, entry] : metadata.tensors) {
      writer.string(name);
      put_tensor_entry(writer, entry);
    }
    for (const auto& [name, place] : metadata.values) {
      writer.string(name);
      // Without fields, as Python writes it.
      writer.global(kModule, "BytesStorageMetadata");
      writer.empty_tuple();
      writer.new_object();
    }
    writer.set_all();
    writer.string("planner_data");
    writer.empty_dict();
    writer.mark();
    for (const auto& [name, path] : metadata.paths) {
      writer.string(name);
      put_path(writer, path);
    }
    writer.set_all();
    writer.string("storage_data");
    writer.empty_dict();
    writer.mark();
    for (const auto& [name, entry] : metadata.tensors) {
      int64_t index = 0;
      for (const auto& chunk : entry.chunks)
        put_place(writer, name, &chunk.rectangle.offsets, index++, chunk.place);
    }
    for (const auto& [name, place] : metadata.values) put_place(writer, name, nullptr, 0, place);
    writer.set_all();
    writer.string("storage_meta");
    if (metadata.mark.empty())
      writer.none();
    else
      put_mark(writer, metadata.mark);
    writer.string("version");
    writer.string("1.0.0");
  });
  return writer.finish();
}

Metadata decode(std::string_view bytes, const std::string& where) {
  return Decoder(bytes, where).run();
}

}  // namespace fsdp::checkpoint
