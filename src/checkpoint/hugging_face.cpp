#include "checkpoint/hugging_face.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "base/format.h"
#include "checkpoint/metadata.h"
#include "checkpoint/safetensors.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int64_t kLargestIndex = 64 << 20;

// The tensors to read from one file.
struct WeightFile {
  std::string file;
  std::set<std::string> names;
  bool all = false;
};

bool is_file(const fs::path& path) {
  std::error_code problem;
  return fs::is_regular_file(path, problem);
}

// Whether the name is that of a safetensors file in the index's own directory.
bool is_plain_name(const std::string& name) {
  return name.ends_with(".safetensors") && name.size() <= 255 && !name.starts_with('.') &&
         std::all_of(name.begin(), name.end(),
                     [](unsigned char c) { return c >= 0x20 && c != 0x7F && c != '/'; });
}

std::string quoted_name(const std::string& name) {
  const bool plain =
      name.size() <= 4096 &&
      std::all_of(name.begin(), name.end(), [](unsigned char c) { return c >= 0x20 && c != 0x7F; });
  return plain ? "\"" + name + "\"" : "(a name with control characters)";
}

std::vector<WeightFile> read_index(const fs::path& dir) {
  const fs::path path = dir / kWeightsIndex;
  const auto refuse = [&](const std::string& what) -> void {
    throw Error(formatted("{}: {}.", path, what),
                "it must be {\"weight_map\": {\"name\": \"model-00001-of-0000N.safetensors\", …}}, "
                "as transformers writes it; download it again.");
  };
  const auto shallow = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > 8) refuse("is nested too deeply");
    return true;
  };
  const std::string text = files::read_whole(path, kLargestIndex);
  Json root;
  try {
    root = Json::parse(text, shallow);
  } catch (const Json::exception&) {
    refuse("isn't JSON");
  }
  const auto map = root.is_object() ? root.find("weight_map") : root.end();
  if (map == root.end() || !map->is_object() || map->empty()) refuse("has no weight_map");
  std::map<std::string, WeightFile> shards;
  for (const auto& [name, value] : map->items()) {
    if (!value.is_string() || !is_plain_name(value.get_ref<const std::string&>()))
      refuse(formatted("the file listed for {} isn't a safetensors file name", quoted_name(name)));
    const auto& file = value.get_ref<const std::string&>();
    WeightFile& shard = shards[file];
    shard.file = file;
    shard.names.insert(name);
  }
  std::vector<WeightFile> all;
  for (auto& [file, shard] : shards) all.push_back(std::move(shard));
  return all;
}

// The only safetensors file, whatever its name.
std::string only_safetensors(const fs::path& dir) {
  std::string found;
  std::error_code problem;
  for (fs::directory_iterator entry(dir, problem), end; !problem && entry != end;
       entry.increment(problem)) {
    const std::string name = entry->path().filename().string();
    if (!is_plain_name(name) || !is_file(entry->path())) continue;
    if (!found.empty())
      throw Error(formatted("{}: has several safetensors files ({}, {}) but no {}.", dir, found,
                            name, kWeightsIndex),
                  "download the index as well.");
    found = name;
  }
  return found;
}

std::vector<WeightFile> find_shards(const fs::path& dir) {
  if (is_file(dir / kWeightsFile)) return {{kWeightsFile, {}, true}};
  if (is_file(dir / kWeightsIndex)) return read_index(dir);
  if (std::string name = only_safetensors(dir); !name.empty()) return {{name, {}, true}};
  for (const char* pickled : {"pytorch_model.bin", "pytorch_model.bin.index.json"})
    if (is_file(dir / pickled))
      throw Error(
          formatted("{}: its weights are in {}, a pickle, which isn't supported.", dir, pickled),
          "convert them in Python: AutoModelForCausalLM.from_pretrained(DIR)"
          ".save_pretrained(NEW) writes safetensors.");
  throw Error(
      formatted("{}: has a config.json but neither {} nor {}.", dir, kWeightsFile, kWeightsIndex),
      "download the weights as well.");
}

StoredTensor stored_of(const SafeTensor& tensor, int64_t data) {
  StoredTensor stored{tensor.dtype, tensor.sizes, std::vector<int64_t>(tensor.sizes.size(), 1),
                      data + tensor.begin};
  for (size_t d = tensor.sizes.size(); d > 1; --d)
    stored.strides[d - 2] = stored.strides[d - 1] * std::max<int64_t>(tensor.sizes[d - 1], 1);
  return stored;
}

void add_shard(HuggingFaceListing& listing, const fs::path& dir, WeightFile shard) {
  const fs::path path = dir / shard.file;
  if (!is_file(path)) {
    const size_t names = shard.names.size();
    const std::string whose = names == 0 ? "" : quoted_name(*shard.names.begin());
    const std::string more = names > 1 ? formatted(" and {} more tensors", names - 1) : "";
    throw Error(
        formatted("{}: is missing; {} lists it for {}{}.", path, kWeightsIndex, whose, more),
        "download or copy it as well.");
  }
  const files::Input file(path);
  const SafeHeader header = read_header(file);
  listing.files.push_back(shard.file);
  for (const auto& tensor : header.tensors) {
    if (!shard.all && shard.names.erase(tensor.name) == 0) continue;  // not in the index
    const std::string name = name_in_model(tensor.name);
    if (name.empty()) {
      listing.left_out.push_back(tensor.name);
      continue;
    }
    const bool fresh =
        listing.tensors
            .try_emplace(name, ListedTensor{shard.file, stored_of(tensor, header.data),
                                            tensor.end - tensor.begin})
            .second;
    if (!fresh)
      throw Error(formatted("{}: \"{}\" occurs twice or under two names.", path, tensor.name),
                  "the directory is damaged; download it again.");
  }
  if (!shard.names.empty())
    throw Error(formatted("{}: {} is missing; {} lists it in this file.", path,
                          quoted_name(*shard.names.begin()), kWeightsIndex),
                "the file is damaged or belongs to another model; download it again.");
}

bool is_number(std::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// A mask of GPT-2: "h.3.attn.bias", with or without "transformer.".
bool is_mask(std::string_view name) {
  constexpr std::string_view kModel = "transformer.", kBlocks = "h.";
  if (name.starts_with(kModel)) name.remove_prefix(kModel.size());
  if (!name.starts_with(kBlocks)) return false;
  name.remove_prefix(kBlocks.size());
  const size_t dot = name.find('.');
  if (dot == std::string_view::npos || !is_number(name.substr(0, dot))) return false;
  const std::string_view rest = name.substr(dot + 1);
  return rest == "attn.bias" || rest == "attn.masked_bias";
}

// Mixtral's names as those of other mixtures.
std::string common_name(std::string name) {
  constexpr std::string_view kBlock = ".block_sparse_moe.";
  const size_t found = name.find(kBlock);
  if (found == std::string::npos) return name;
  name.replace(found, kBlock.size(), ".mlp.");
  for (const auto& [theirs, common] :
       {std::pair(".w1.weight", ".gate_proj.weight"), std::pair(".w2.weight", ".down_proj.weight"),
        std::pair(".w3.weight", ".up_proj.weight")})
    if (name.ends_with(theirs)) name.replace(name.size() - std::strlen(theirs), name.npos, common);
  return name;
}

}  // namespace

bool is_peft(const fs::path& dir) {
  std::error_code problem;
  return is_file(dir / kPeftConfig) && is_file(dir / kPeftWeights) &&
         !is_file(dir / kWeightsFile) && !is_file(dir / kWeightsIndex) &&
         !fs::exists(dir / kMetadataName, problem);
}

bool is_hugging_face(const fs::path& dir) {
  std::error_code problem;
  return is_file(dir / "config.json") && !fs::exists(dir / kMetadataName, problem) && !is_peft(dir);
}

HuggingFaceListing list_hugging_face(const fs::path& dir) {
  HuggingFaceListing listing;
  if (is_peft(dir)) {
    add_shard(listing, dir, {kPeftWeights, {}, true});
    return listing;
  }
  for (auto& shard : find_shards(dir)) add_shard(listing, dir, std::move(shard));
  return listing;
}

std::string name_in_model(const std::string& name) {
  if (name.starts_with(kPeftPrefix)) return name_in_model(name.substr(std::strlen(kPeftPrefix)));
  if (name.ends_with(".rotary_emb.inv_freq") || is_mask(name)) return "";
  for (const char* images : {"vision_tower.", "multi_modal_projector."})  // beside a text model
    if (name.starts_with(images) || name.starts_with(std::string("model.") + images)) return "";
  if (constexpr std::string_view kText = "language_model."; name.starts_with(kText))
    return name_in_model(name.substr(kText.size()));
  if (constexpr std::string_view kText = "model.language_model."; name.starts_with(kText))
    return name_in_model(name.substr(kText.size()));
  for (const char* begin : {"wte.", "wpe.", "h.", "ln_f."})
    if (name.starts_with(begin)) return "transformer." + name;
  for (const char* begin : {"embed_tokens.", "layers.", "norm."})
    if (name.starts_with(begin)) return common_name("model." + name);
  return common_name(name);
}

std::optional<ExpertMatrix> expert_matrix(const std::string& name) {
  constexpr std::string_view kExperts = ".mlp.experts.";
  const size_t found = name.find(kExperts);
  if (found == std::string::npos) return std::nullopt;
  const size_t begin = found + kExperts.size(), dot = name.find('.', begin);
  if (dot == std::string::npos || dot - begin > 6 || !is_number(name.substr(begin, dot - begin)))
    return std::nullopt;
  const std::string part = name.substr(dot + 1), before = name.substr(0, begin);
  const bool down = part == "down_proj.weight", up = part == "up_proj.weight";
  if (!down && !up && part != "gate_proj.weight") return std::nullopt;
  return ExpertMatrix{.parameter = before + (down ? "down_proj" : "gate_up_proj"),
                      .expert = std::stoll(name.substr(begin, dot - begin)),
                      .second = up};
}

}  // namespace fsdp::checkpoint
