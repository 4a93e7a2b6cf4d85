// init_parameters: fills each rank's shards where they lie, by counter-based random numbers.
#include "fsdp/init_parameters.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cmath>
#include <vector>

#include "base/format.h"
#include "kernels/ops.h"
#include "shard/contents.h"
#include "shard/engine.h"
#include "shard/model.h"
#include "shard/on_disk.h"
#include "shard/tree.h"

namespace fsdp {
namespace {

using Kind = Distribution::Kind;

// Of the sequence of numbers that a parameter takes its elements from.
uint64_t key_of(uint64_t seed, const std::string& name) {
  return XXH3_64bits_withSeed(name.data(), name.size(), seed);
}

void check_distribution(const Distribution& d, const shard::Parameter& p) {
  const bool finite = std::isfinite(d.a) && std::isfinite(d.b);
  if (!finite || (d.kind == Kind::kNormal && d.b < 0) || (d.kind == Kind::kUniform && d.b < d.a))
    throw Error(formatted("init_parameters: the rule's distribution of \"{}\" has the numbers {:f} "
                          "and {:f}.",
                          p.name(), d.a, d.b),
                "use finite numbers, a deviation of 0 or more, and a lower bound below the upper.");
  if (d.kind != Kind::kConstant && !at::isFloatingType(p.handle.scalar_type()))
    throw Error(formatted("init_parameters: \"{}\" isn't a floating-point parameter and can't be "
                          "random.",
                          p.name()),
                "return Distribution::constant() for it.");
}

void require_buffers(const shard::ModuleTree& tree) {
  shard::for_each_module(tree, [](const shard::ModuleTree& node) {
    for (const auto& [name, buffer] : node.buffers)
      if (buffer.is_meta())
        throw Error(formatted("init_parameters: buffer \"{}\" is on the meta device, and no rule "
                              "gives it a value.",
                              name),
                    "build the module with fsdp::deferred_init, which computes buffers, instead of "
                    "on the meta device.");
  });
}

// Distributions by parameter, so that a rule that throws changes nothing.
std::vector<Distribution> distributions_of(const shard::Flat& flat, const InitRule& rule) {
  std::vector<Distribution> found;
  for (const shard::Parameter& p : flat.parameters()) {
    found.push_back(rule(p.name(), p.sizes));
    check_distribution(found.back(), p);
  }
  return found;
}

void fill_flat(shard::Flat& flat, const std::vector<Distribution>& distributions, uint64_t seed) {
  const at::Tensor master = flat.edit_master();
  for (size_t i = 0; i < distributions.size(); ++i) {
    const shard::Slice slice = flat.layout().slice(i, flat.rank());
    if (slice.numel > 0)
      kernels::fill_random_(flat.part_of(i, master), distributions[i],
                            key_of(seed, flat.parameters()[i].name()), slice.begin);
  }
}

}  // namespace

void init_parameters(const Sharded& sharded, uint64_t seed, const InitRule& rule) {
  if (!rule)
    throw Error("init_parameters has no rule.",
                "pass a function that says how each parameter starts.");
  const shard::Locked model = shard::lock(sharded);
  if (model->tree) require_buffers(*model->tree);
  std::vector<std::vector<Distribution>> distributions;
  for (const shard::Flat* flat : model->flats())
    distributions.push_back(distributions_of(*flat, rule));
  shard::Unseen unseen;
  shard::begin_load(*model, "init_parameters");
  auto next = distributions.begin();
  for (const auto& unit : model->units) {
    for (const auto& flat : unit->flats) fill_flat(*flat, *next++, seed);
    shard::loaded(*model, *unit);
    for (const auto& flat : unit->flats) shard::put_away(*flat);
    unit->meta = false;
  }
}

void init_tensor_(const at::Tensor& tensor, const Distribution& distribution) {
  at::NoGradGuard no_grad;
  if (distribution.kind == Kind::kConstant)
    tensor.fill_(distribution.a);
  else if (distribution.kind == Kind::kNormal)
    tensor.normal_(distribution.a, distribution.b);
  else
    tensor.uniform_(distribution.a, distribution.b);
}

}  // namespace fsdp
