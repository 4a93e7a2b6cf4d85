#include "checkpoint/each_host.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "base/format.h"
#include "checkpoint/files.h"
#include "checkpoint/files_needed.h"
#include "checkpoint/manifest.h"
#include "checkpoint/metadata.h"
#include "checkpoint/save_plan.h"
#include "checkpoint/together.h"
#include "fsdp/error.h"
#include "shard/model.h"

namespace fsdp::checkpoint {
namespace {

using Path = std::filesystem::path;
using Json = nlohmann::json;
using Sizes = std::map<std::string, int64_t>;  // of files, by name

constexpr int64_t kPassed = 32 << 20;  // bytes per broadcast

int leader_of(const World& world) {
  return world.rank() - world.local_rank();
}

Sizes files_in(const Path& dir) {
  Sizes found;
  std::error_code problem;
  for (const auto& entry : std::filesystem::directory_iterator(dir, problem)) {
    std::error_code gone;
    if (!entry.is_regular_file(gone)) continue;
    const auto size = entry.file_size(gone);
    if (!gone) found[entry.path().filename().string()] = static_cast<int64_t>(size);
  }
  return found;
}

// Without those that weren't written to their end, as far as the manifest tells.
Sizes whole_files_in(const Path& dir) {
  Sizes found = files_in(dir);
  const auto manifest = read_manifest(dir);
  if (!manifest) return found;
  std::erase_if(found, [&](const auto& file) {
    const auto listed = manifest->files.find(file.first);
    return listed != manifest->files.end() && listed->second.size != file.second;
  });
  return found;
}

// What this host has of the checkpoint, and what belongs to it if the host knows.
Json held_of(const Path& dir) {
  Json held = {{"has", files_in(dir)}};
  try {
    if (const auto manifest = read_manifest(dir)) {
      Sizes all;
      for (const auto& [name, file] : manifest->files) all[name] = file.size;
      held["all"] = all;
    }
  } catch (const Error&) {  // half a manifest: the host died while it wrote it
  }
  return held;
}

Json inventory(const Path& folder) {
  Json found = Json::object();
  std::error_code problem;
  for (const auto& entry : std::filesystem::directory_iterator(folder, problem)) {
    const Path name = entry.path().filename();
    if (entry.is_directory(problem) && name.extension().empty() && !entry.is_symlink(problem))
      found[name.string()] = held_of(entry.path());
  }
  return found;
}

// By what all hosts have of one checkpoint.
bool is_whole(const std::vector<Json>& hosts) {
  std::map<std::string, std::set<int64_t>> has;
  Sizes all;
  for (const Json& host : hosts) {
    for (const auto& [name, size] : host.at("has").get<Sizes>()) has[name].insert(size);
    if (host.contains("all")) all = host.at("all").get<Sizes>();
  }
  return !all.empty() && has.contains(kManifestName) &&
         std::all_of(all.begin(), all.end(), [&](const auto& file) {
           return has.contains(file.first) && has.at(file.first).contains(file.second);
         });
}

std::string newest_whole(const std::vector<std::string>& inventories) {
  std::map<std::pair<size_t, std::string>, std::vector<Json>> found;  // by length, then name
  for (const std::string& text : inventories) {
    if (text.empty()) continue;  // a rank that isn't the first of its host
    const Json host = Json::parse(text);
    for (const auto& [name, held] : host.items()) found[{name.size(), name}].push_back(held);
  }
  for (auto one = found.rbegin(); one != found.rend(); ++one)
    if (is_whole(one->second)) return one->first.second;
  return "";
}

// --- bringing files ---

struct Transfer {
  std::string file;
  int64_t size;
  int from;          // the rank that reads it
  std::set<int> to;  // ranks that write it
};

std::vector<Transfer> plan_transfers(const std::vector<std::string>& texts, const Path& dir) {
  std::map<std::string, std::pair<int, int64_t>> holders;
  std::map<std::string, std::set<int>> needed;
  for (const std::string& text : texts) {
    const Json rank = Json::parse(text);
    const int leader = rank.at("leader");
    for (const auto& [file, size] : rank.at("has").get<Sizes>())
      holders.emplace(file, std::pair(leader, size));
    for (const std::string& file : rank.at("needs").get<std::set<std::string>>())
      needed[file].insert(leader);
  }
  std::vector<Transfer> plan;
  for (const auto& [file, leaders] : needed) {
    if (!holders.contains(file))
      throw Error(formatted("{}: no host has {}.", dir, file),
                  "load another checkpoint; this one was lost with its host.");
    plan.push_back({file, holders.at(file).second, holders.at(file).first, leaders});
  }
  return plan;
}

void pass_on(const World& world, const Path& dir, const Transfer& transfer) {
  const bool reads = world.rank() == transfer.from, writes = transfer.to.contains(world.rank());
  std::unique_ptr<files::Input> in;
  std::unique_ptr<files::Output> out;
  const std::string label = "bringing " + transfer.file + " to other hosts";
  together(world, label, [&] {
    if (reads) in = std::make_unique<files::Input>(dir / transfer.file);
    if (writes) out = std::make_unique<files::Output>(dir / transfer.file, transfer.size);
  });
  const auto block = at::TensorOptions(at::kByte);
  for (int64_t at = 0; at < transfer.size; at += kPassed) {
    const int64_t count = std::min(kPassed, transfer.size - at);
    at::Tensor bytes = at::empty({count}, block);
    if (reads) in->read(at, bytes.data_ptr(), static_cast<size_t>(count));
    bytes = bytes.to(world.device());
    world.comm().broadcast(bytes, transfer.from, {.label = label});
    if (!writes) continue;
    bytes = bytes.cpu();
    out->append(bytes.const_data_ptr(), static_cast<size_t>(count));
  }
  together(world, label + ": end", [&] {
    if (out) out->close();
  });
}

void bring(const World& world, const Path& dir, const std::set<std::string>& files) {
  const bool leads = world.local_rank() == 0;
  const Sizes here = whole_files_in(dir);
  std::set<std::string> missing;
  for (const std::string& file : files)
    if (!here.contains(file)) missing.insert(file);
  const Json mine = {{"leader", leader_of(world)}, {"needs", missing}, {"has", leads ? here : Sizes()}};
  // Every rank makes the same plan.
  const auto texts = texts_of_all(world, "which files hosts have", mine.dump());
  for (const Transfer& transfer : plan_transfers(texts, dir)) pass_on(world, dir, transfer);
}

}  // namespace

std::string newest_of_hosts(const World& world, const Path& folder) {
  const std::string mine = world.local_rank() == 0 ? inventory(folder).dump() : "";
  return newest_whole(texts_of_all(world, "checkpoints in memory", mine));
}

bool every_host_has_all(const Sharded& model) {
  return ranks_of_a_copy(*shard::lock(model)) > 0;
}

void bring_to_hosts(const World& world, const Path& dir, const Sharded& model,
                    const Optimizer* optimizer, const LoadOptions& options) {
  if (world.size() == world.local_size()) return;
  together(world, "a folder for " + dir.filename().string(), [&] {
    if (world.local_rank() == 0) files::make_directories(dir);
  });
  bring(world, dir, {kManifestName, kMetadataName, "__0_0.distcp"});
  bring(world, dir, files_needed(dir, model, optimizer, options));
}

}  // namespace fsdp::checkpoint
