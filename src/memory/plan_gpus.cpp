// Known GPUs, from the vendor's data sheets: dense products, without sparsity. Memory is what the
// driver reports, a little less than the name says.
#include <charconv>

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/plan.h"

namespace fsdp {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

int64_t gib(double size) {
  return static_cast<int64_t>(size * kGiB);
}

}  // namespace

const std::vector<Gpu>& known_gpus() {
  //                       memory      bf16   fp32  memory  node  network  host
  static const std::vector<Gpu> gpus = {
      {"a100-40", gib(39.4), 312, 19.5, 1555, 300, 25, 32},
      {"a100-80", gib(79.2), 312, 19.5, 2039, 300, 25, 32},
      {"h100", gib(79.1), 989.5, 67, 3350, 450, 50, 64},
      {"h200", gib(139.8), 989.5, 67, 4800, 450, 50, 64},
      {"b200", gib(178.4), 2250, 75, 8000, 900, 50, 64},
  };
  return gpus;
}

Gpu gpu(const std::string& name) {
  std::string known;
  for (const Gpu& one : known_gpus()) {
    if (one.name == name) return one;
    known += one.name + ", ";
  }
  double size = 0;
  auto [end, problem] = std::from_chars(name.data(), name.data() + name.size(), size);
  if (problem != std::errc() || end != name.data() + name.size() || !(size > 0) || size > 1e6)
    throw Error(formatted("unknown GPU \"{}\".", name),
                formatted("choose from {}or pass its memory in GB.", known));
  Gpu like = gpu("h100");
  like.name = name + " GB";
  like.memory = static_cast<int64_t>(size * 1e9);
  return like;
}

}  // namespace fsdp
