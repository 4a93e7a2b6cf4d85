#include "memory/plan_search.h"

#include <algorithm>

namespace fsdp::memory {
namespace {

double plan_bytes(const Plan& plan) {
  return static_cast<double>(plan.memory.total());
}

double rise(const Found& from, const Found& to) {
  return (plan_bytes(to.plan) - plan_bytes(from.plan)) / static_cast<double>(to.batch - from.batch);
}

}  // namespace

const DryRun& AtBatch::run(PlanOptions options, int64_t batch) {
  options.batch = batch;
  auto known = runs_.find(batch);
  if (known == runs_.end()) known = runs_.emplace(batch, dry_run(model_, options)).first;
  return known->second;
}

Plan AtBatch::operator()(PlanOptions options, int64_t batch) {
  options.batch = batch;
  return plan_from(run(options, batch), options);
}

Found find_largest(AtBatch& at_batch, const PlanOptions& options, Slope& slope) {
  const int64_t most = options.batch > 0 ? options.batch : kMostSamples;
  const auto room = static_cast<double>(options.gpu->memory);
  const Found one{1, at_batch(options, 1)};
  if (!one.plan.fits) return {0, one.plan};
  Found best = one, last = one;
  int64_t bad = most + 1;       // the smallest batch known not to fit
  bool told = slope.bytes > 0;  // an earlier search found the slope
  double steep = slope.bytes;
  while (best.batch + 1 < bad) {
    int64_t little = std::max<int64_t>(1, best.batch / 50);
    if (bad <= most && bad - best.batch <= little) break;
    double line = best.batch > 1 ? rise(one, best) : steep;
    double step = line * static_cast<double>(little);
    if (step > 0 && plan_bytes(best.plan) + step > room + step / 4) break;  // clearly too much
    double promised = steep > 0
                          ? static_cast<double>(last.batch) + (room - plan_bytes(last.plan)) / steep
                          : 2.0 * static_cast<double>(best.batch);
    if (options.host_memory > 0 && slope.host > 0) {
      double share = static_cast<double>(options.host_memory) /
                     std::min(options.ranks_per_node, options.world);
      double free = share - static_cast<double>(one.plan.memory.host);
      promised = std::min(promised, 1 + free / slope.host);
    }
    if (!told) promised = std::min(promised, 4.0 * static_cast<double>(best.batch));
    auto next = static_cast<int64_t>(std::min(promised, static_cast<double>(bad)));
    if (bad <= most && next >= bad) next = (best.batch + bad) / 2;
    next = std::clamp(next, std::min(best.batch + little, bad - 1), bad - 1);
    Found tried{next, at_batch(options, next)};
    steep = rise(last, tried);
    last = tried;
    if (tried.plan.fits)
      best = std::move(tried);
    else
      bad = next;
  }
  if (best.batch > 1) {
    slope.bytes = std::max(1.0, rise(one, best));
    slope.host = static_cast<double>(best.plan.memory.host - one.plan.memory.host) /
                 static_cast<double>(best.batch - 1);
    double samples = static_cast<double>(best.batch - 1) * options.micro_batches;
    slope.compute = (best.plan.time.compute - one.plan.time.compute) / samples;
    slope.offload = (best.plan.time.offload - one.plan.time.offload) / samples;
  } else if (last.batch > 1) {
    slope.bytes = std::max(1.0, rise(one, last));
  }
  return best;
}

}  // namespace fsdp::memory
