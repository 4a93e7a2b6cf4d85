// DeviceMesh: the ranks of a world laid out along named dimensions, with communicators for each.
//
//   DeviceMesh mesh(world, {{"replicate", 2}, {"shard", 4}});   // 8 ranks; shard varies fastest
//   mesh.comm("shard").all_gather(…);                           // among the 4 ranks of my row
#pragma once

#include <string>
#include <vector>

#include "fsdp/world.h"

namespace fsdp {

struct MeshDimension {
  std::string name;
  int size;
};

class DeviceMesh {
 public:
  DeviceMesh() = default;
  // The sizes' product must be the world's size. Ranks are laid out in order, the last dimension
  // varying fastest, so that with fsdp run's rank order it stays inside a node.
  DeviceMesh(World world, std::vector<MeshDimension> dimensions);

  const World& world() const;
  const std::vector<MeshDimension>& dimensions() const;
  bool has(const std::string& dimension) const;
  int size(const std::string& dimension) const;
  int coordinate(const std::string& dimension) const;  // this rank's place along it
  std::vector<int> ranks(
      const std::string& dimension) const;  // of the world, along it through here

  // This rank's communicator along a dimension. `purpose` makes independent ones for operations
  // that must not queue behind each other ("gather", "reduce"). Made at first use, then kept;
  // collective over the ranks of the dimension.
  const Communicator& comm(const std::string& dimension, const std::string& purpose = "") const;

  explicit operator bool() const { return state_ != nullptr; }

 private:
  struct State;
  int index(const std::string& dimension) const;
  std::shared_ptr<State> state_;
};

}  // namespace fsdp
