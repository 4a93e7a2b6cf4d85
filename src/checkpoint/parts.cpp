#include "checkpoint/parts.h"

#include <algorithm>

#include "shard/contents.h"
#include "shard/rectangles.h"
#include "shard/tree.h"

namespace fsdp::checkpoint {

std::vector<Part> parts_of(const shard::Flat& flat, size_t parameter, const at::Tensor& mine) {
  const auto& p = flat.parameters()[parameter];
  const auto slice = flat.layout().slice(parameter, flat.rank());
  std::vector<int64_t> back(p.order.size());
  for (size_t d = 0; d < p.order.size(); ++d) back[p.order[d]] = static_cast<int64_t>(d);
  std::vector<Part> parts;
  int64_t at = 0;  // rectangles come in memory order
  for (auto& rectangle : shard::rectangles_of(p.sizes, p.order, slice.begin, slice.numel)) {
    std::vector<int64_t> in_memory;
    int64_t numel = 1;
    for (int64_t d : p.order) in_memory.push_back(rectangle.sizes[d]);
    for (int64_t size : in_memory) numel *= size;
    at::Tensor memory = mine.detach().narrow(0, at, numel).view(in_memory).permute(back);
    parts.push_back({std::move(rectangle), std::move(memory)});
    at += numel;
  }
  return parts;
}

std::vector<ShardedParameter> sharded_parameters(const shard::Engine& model) {
  std::vector<ShardedParameter> all;
  for (const auto& unit : shard::units_of(model))
    for (const auto& flat : unit->flats)
      for (size_t i = 0; i < flat->parameters().size(); ++i) all.push_back({flat.get(), i});
  return all;
}

std::vector<std::pair<std::string, at::Tensor>> replicated_tensors(const shard::Engine& model) {
  std::vector<std::pair<std::string, at::Tensor>> found;
  shard::for_each_module(*shard::tree_of(model), [&](const shard::ModuleTree& node) {
    for (const auto* tensors : {&node.parameters, &node.buffers})
      for (const auto& [name, tensor] : *tensors) {
        if (!tensor.defined()) continue;
        const shard::StorageTag* tag = shard::tag_of(tensor);
        if (!tag || tag->kind != shard::StorageTag::kParameters) found.emplace_back(name, tensor);
      }
  });
  return found;
}

bool Turns::mine(const ShardedParameter& parameter, int64_t bytes) {
  const auto& group = *parameter.flat->unit().group;
  if (group.replicate_size <= 1) return true;
  auto& given = given_[&group];
  given.resize(group.replicate_size);
  const auto least = std::min_element(given.begin(), given.end());
  *least += bytes;
  return least - given.begin() == group.replicate.rank();
}

}  // namespace fsdp::checkpoint
