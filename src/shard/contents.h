// What checkpoints and reports read and write of a sharded model.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace fsdp {
struct MemoryReport;
class World;
}  // namespace fsdp

namespace fsdp::shard {

struct Engine;
class Flat;
struct ModuleTree;
class Unit;

const std::vector<std::shared_ptr<Unit>>& units_of(const Engine& model);
const ModuleTree* tree_of(const Engine& model);  // null: its module is gone
const World& world_of(const Engine& model);
at::Device device_of(const Engine& model);
MemoryReport memory_of(const Engine& model);

// The full buffer, from every rank's `shard` (the flat's master, gradient or state). Collective.
at::Tensor gather_shard(Engine& model, Flat& flat, const at::Tensor& shard, const char* what);

// From here on masters may be written, because no rank reads parameters before its next gather.
// Collective where ranks share memory. `why` names the caller.
void begin_load(Engine& model, const char* why);
// The masters of the unit were written.
void loaded(Engine& model, Unit& unit);

}  // namespace fsdp::shard
