#include "fsdp/mesh.h"

#include <map>
#include <set>

#include "base/format.h"
#include "base/mutex.h"
#include "comm/next_number.h"

namespace fsdp {

struct DeviceMesh::State {
  World world;
  std::vector<MeshDimension> dimensions;
  std::vector<int> strides;
  int number = 0;  // tells meshes of one world apart
  Mutex mutex;
  // By dimension and purpose.
  std::map<std::string, Communicator> communicators FSDP_GUARDED_BY(mutex);
};

DeviceMesh::DeviceMesh(World world, std::vector<MeshDimension> dimensions) {
  std::string shape;
  int64_t product = 1;
  std::set<std::string> seen;
  for (const auto& [name, size] : dimensions) {
    shape += formatted("{}{}={}", shape.empty() ? "" : " x ", name, size);
    if (name.empty() || size < 1)
      throw Error(formatted("mesh {}: a dimension needs a name and a size of at least 1.", shape),
                  "write the mesh as {{\"replicate\", 2}, {\"shard\", 4}}.");
    if (!seen.insert(name).second)
      throw Error(formatted("mesh {}: two dimensions are named \"{}\".", shape, name),
                  "give every dimension its own name.");
    product *= size;
  }
  if (product != world.size())
    throw Error(formatted("mesh {} has {} positions, but the world has {} ranks.",
                          shape.empty() ? "without dimensions" : shape, product, world.size()),
                formatted("choose sizes whose product is {}, or start a different number of ranks.",
                          world.size()));
  state_ = std::make_shared<State>();
  state_->world = std::move(world);
  state_->number = comm::next_number(state_->world);
  state_->strides.resize(dimensions.size());
  int stride = 1;
  for (size_t d = dimensions.size(); d-- > 0; stride *= dimensions[d].size)
    state_->strides[d] = stride;
  state_->dimensions = std::move(dimensions);
}

const World& DeviceMesh::world() const {
  return state_->world;
}
const std::vector<MeshDimension>& DeviceMesh::dimensions() const {
  return state_->dimensions;
}

int DeviceMesh::index(const std::string& dimension) const {
  std::string known;
  for (size_t d = 0; d < state_->dimensions.size(); ++d) {
    if (state_->dimensions[d].name == dimension) return static_cast<int>(d);
    known += (known.empty() ? "\"" : ", \"") + state_->dimensions[d].name + "\"";
  }
  throw Error(formatted("the mesh has no dimension \"{}\".", dimension),
              formatted("it has {}.", known));
}

bool DeviceMesh::has(const std::string& dimension) const {
  for (const auto& known : state_->dimensions)
    if (known.name == dimension) return true;
  return false;
}

int DeviceMesh::size(const std::string& dimension) const {
  return state_->dimensions[index(dimension)].size;
}

int DeviceMesh::coordinate(const std::string& dimension) const {
  int d = index(dimension);
  return state_->world.rank() / state_->strides[d] % state_->dimensions[d].size;
}

std::vector<int> DeviceMesh::ranks(const std::string& dimension) const {
  int d = index(dimension), stride = state_->strides[d];
  int first = state_->world.rank() - coordinate(dimension) * stride;
  std::vector<int> ranks;
  for (int i = 0; i < state_->dimensions[d].size; ++i) ranks.push_back(first + i * stride);
  return ranks;
}

const Communicator& DeviceMesh::comm(const std::string& dimension,
                                     const std::string& purpose) const {
  Lock lock(state_->mutex);
  std::string key = dimension + (purpose.empty() ? "" : "." + purpose);
  Communicator& known = state_->communicators[key];
  if (!known) {
    auto along = ranks(dimension);
    // Rows of one dimension differ in their ranks, so the name includes them.
    std::string name = "mesh";
    name += formatted("{}.{}@{}", state_->number, key, along.front());
    if (along.size() > 1) name += formatted("+{}", along[1] - along[0]);
    known = state_->world.communicator(along, name);
  }
  return known;
}

}  // namespace fsdp
