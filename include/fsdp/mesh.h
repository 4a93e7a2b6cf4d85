/// @file
/// The ranks of a world along named dimensions, with communicators for each dimension.
///
///     DeviceMesh mesh(world, {{"replicate", 2}, {"shard", 4}});   // 8 ranks; shard varies fastest
///     mesh.comm("shard").all_gather(…);                           // among the 4 ranks of my row
#pragma once

#include <string>
#include <vector>

#include "fsdp/world.h"

namespace fsdp {

/// A dimension of a DeviceMesh.
struct MeshDimension {
  std::string name;  ///< "shard", "replicate", …; unique in the mesh.
  int size;          ///< Number of ranks along it.
};

/// The ranks of a world along named dimensions. A shared handle.
class DeviceMesh {
 public:
  /// A handle to no mesh.
  DeviceMesh() = default;
  /// The product of the sizes must be the world's size. Ranks are placed in order, and the last
  /// dimension varies fastest: with fsdp run's rank order it stays inside a node.
  DeviceMesh(World world, std::vector<MeshDimension> dimensions);

  const World& world() const;                            ///< The world.
  const std::vector<MeshDimension>& dimensions() const;  ///< All dimensions, slowest first.
  bool has(const std::string& dimension) const;          ///< Whether there is such a dimension.
  int size(const std::string& dimension) const;          ///< Number of ranks along a dimension.
  int coordinate(const std::string& dimension) const;    ///< This rank's place along it.

  /// World ranks along a dimension that share this rank's other coordinates.
  std::vector<int> ranks(const std::string& dimension) const;

  /// This rank's communicator along a dimension. Different `purpose`s ("gather", "reduce") give
  /// independent communicators, so that one's operations don't queue behind the other's. Made at
  /// first use and kept. Collective over the ranks of the dimension.
  const Communicator& comm(const std::string& dimension, const std::string& purpose = "") const;

  /// Whether it refers to a mesh.
  explicit operator bool() const { return state_ != nullptr; }

 private:
  struct State;
  int index(const std::string& dimension) const;
  std::shared_ptr<State> state_;
};

}  // namespace fsdp
