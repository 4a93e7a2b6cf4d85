#include "shard/group.h"

#include <utility>
#include <vector>

#include "base/format.h"
#include "base/mutex.h"
#include "comm/next_number.h"
#include "fsdp/fully_shard.h"
#include "shard/runtime.h"

namespace fsdp {
namespace {

[[noreturn]] void refuse_parts(int parts) {
  throw Error(formatted("reshard_after_forward = {} isn't a number of parts.", parts),
              "pass true to reshard after forward, false to keep the parameters until backward, or "
              "n >= 2 to keep 1/n of a unit on each rank.");
}

}  // namespace

ReshardAfterForward::ReshardAfterForward(int parts) : keep_parts(parts) {
  if (parts < 1) refuse_parts(parts);
}

namespace shard {
namespace {

DeviceMesh default_mesh(const World& world, ShardingStrategy strategy) {
  if (strategy == ShardingStrategy::NO_SHARD)
    return DeviceMesh(world, {{"replicate", world.size()}});
  if (strategy != ShardingStrategy::HYBRID_SHARD)
    return DeviceMesh(world, {{"shard", world.size()}});
  int node = world.local_size();
  if (node < 1 || world.size() % node != 0)
    throw Error(formatted("HYBRID_SHARD shards inside a node and replicates across nodes, but {} "
                          "ranks do not make whole nodes of {}.",
                          world.size(), node),
                formatted("pass a mesh {{{{\"replicate\", r}}, {{\"shard\", s}}}} with r·s = {}.",
                          world.size()));
  return DeviceMesh(world, {{"replicate", world.size() / node}, {"shard", node}});
}

// For parameters, the ranks that share sequences are like any others: "context" becomes a part of
// the dimension before it, or of the next one.
DeviceMesh without_context(const DeviceMesh& mesh, ShardingStrategy strategy) {
  if (!mesh.has("context")) return mesh;
  std::vector<MeshDimension> dimensions;
  int first = 1;  // ranks of a context before all other dimensions
  for (const MeshDimension& dimension : mesh.dimensions()) {
    if (dimension.name != "context")
      dimensions.push_back({dimension.name, dimension.size * std::exchange(first, 1)});
    else if (dimensions.empty())
      first = dimension.size;
    else
      dimensions.back().size *= dimension.size;
  }
  if (dimensions.empty())
    dimensions.push_back({strategy == ShardingStrategy::NO_SHARD ? "replicate" : "shard", first});
  return DeviceMesh(mesh.world(), dimensions);
}

// Throws for a dimension that fully_shard doesn't know.
std::string text_of(const DeviceMesh& mesh) {
  std::string text;
  for (const MeshDimension& dimension : mesh.dimensions()) {
    if (dimension.name != "shard" && dimension.name != "replicate")
      throw Error(formatted("the mesh has a dimension \"{}\".", dimension.name),
                  "fully_shard takes the dimensions \"replicate\", \"shard\" and \"context\".");
    text += formatted("{}{}={}", text.empty() ? "" : " x ", dimension.name, dimension.size);
  }
  return text;
}

void join_communicators(Group& group, const ShardOptions& options, at::Device device) {
  const bool sharded = options.strategy != ShardingStrategy::NO_SHARD;
  std::string shard = "shard", replicate = "replicate";
  if (!sharded && !group.mesh.has("replicate")) std::swap(shard, replicate);
  if (sharded && group.mesh.has(shard)) {
    group.shard_size = group.mesh.size(shard);
    group.shard_rank = group.mesh.coordinate(shard);
    group.gather = group.mesh.comm(shard, "gather");
    group.reduce = group.mesh.comm(shard, "reduce");
  } else if (sharded) {
    throw Error(formatted("the mesh {} has no dimension \"shard\".", group.text),
                "add it, or use ShardingStrategy::NO_SHARD.");
  } else if (group.mesh.has(shard)) {
    throw Error(formatted("NO_SHARD on the mesh {}: there is nothing to shard over.", group.text),
                "use a mesh with only \"replicate\", or HYBRID_SHARD.");
  }
  if (group.mesh.has(replicate)) {
    group.replicate_size = group.mesh.size(replicate);
    group.replicate = group.mesh.comm(replicate, "replicate");
  }
  group.shares_memory = group.gather && device.is_cpu() && options.share_host_memory &&
                        group.gather.backend_name() == "shm";
}

}  // namespace

std::shared_ptr<Group> group_for(const World& world, const ShardOptions& options,
                                 at::Device device) {
  std::string key = options.mesh ? "" : std::string(name(options.strategy)) + device.str();
  if (!key.empty() && !options.share_host_memory) key += " apart";
  auto& groups = runtime().groups;
  Lock lock(groups.mutex);
  std::erase_if(groups.known, [](const auto& entry) { return entry.second.expired(); });
  if (!key.empty())
    for (const auto& [other, weak] : groups.known)
      if (auto group = weak.lock(); group && other == key && group->mesh.world() == world)
        return group;
  auto group = std::make_shared<Group>();
  group->mesh = options.mesh ? without_context(options.mesh, options.strategy)
                             : default_mesh(world, options.strategy);
  group->number = comm::next_number(world);
  group->text = text_of(group->mesh);
  join_communicators(*group, options, device);
  if (!key.empty()) groups.known.emplace_back(key, group);
  return group;
}

const Communicator& Group::neighbours(int parts) {
  Lock lock(mutex_);
  if (auto known = neighbours_.find(parts); known != neighbours_.end()) return known->second;
  std::vector<int> row = mesh.ranks("shard"), ranks;
  int first = shard_rank / parts * parts;
  for (int i = 0; i < parts; ++i) ranks.push_back(row[first + i]);
  const std::string name = formatted("group{}.neighbours.{}@{}", number, parts, ranks[0]);
  return neighbours_.emplace(parts, mesh.world().communicator(ranks, name)).first->second;
}

int parts_kept(const ReshardAfterForward& choice, bool keeps, const Group& group) {
  int parts = choice.keep_parts.value_or(keeps ? 1 : 0);
  if (parts < 0) refuse_parts(parts);
  if (parts <= 1) return parts;
  if (group.shard_size % parts != 0)
    throw Error(formatted("reshard_after_forward = {} on a mesh with {}: it must divide the number "
                          "of ranks that share a unit.",
                          parts, group.text),
                formatted("choose a divisor of {}, or true or false.", group.shard_size));
  return parts == group.shard_size ? 0 : parts;
}

}  // namespace shard
}  // namespace fsdp
