// A module over tiles of rows, each a region.
#include <ATen/ops/cat.h>

#include <vector>

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/recompute.h"

namespace fsdp {

// split and cat are one autograd node each, so backward runs tile by tile, the last one first, and
// puts the gradients of x together once.
at::Tensor tiled(const std::function<at::Tensor(const at::Tensor&)>& module, const at::Tensor& x,
                 int64_t tile) {
  if (tile < 1)
    throw Error(formatted("tiled() was called with tiles of {} rows.", tile),
                "pass the number of rows to compute at a time, at least 1.");
  if (x.dim() < 2)
    throw Error(formatted("tiled() was called with a tensor of {} dimensions.", x.dim()),
                "pass [.., rows, dim].");
  const at::Tensor rows = x.flatten(0, -2);
  std::vector<at::Tensor> parts;
  for (const at::Tensor& part : rows.split(tile)) {
    parts.push_back(recompute(module, part));
    if (parts.back().dim() < 1 || parts.back().size(0) != part.size(0))
      throw Error("the module under tiled() returned another number of rows than it was given.",
                  "pass a module that treats every row alone.");
  }
  const at::Tensor out = parts.size() == 1 ? parts[0] : at::cat(parts);
  return out.unflatten(0, x.sizes().slice(0, x.dim() - 1));
}

}  // namespace fsdp
