#include "memory/plan_time.h"

#include <algorithm>
#include <cmath>

namespace fsdp::memory {
namespace {

constexpr double kProducts = 0.70;   // share of peak flops that products and attention reach
constexpr double kBandwidth = 0.85;  // share of memory bandwidth that streaming kernels reach
constexpr double kLinks = 0.75;      // share of link bandwidth that collectives reach
constexpr double kHostLink = 0.87;   // share of the host link that copies of pinned memory reach
constexpr double kLatency = 20e-6;   // seconds of a collective within a node
constexpr double kPerNode = 3e-6;    // added by each further node
constexpr double kAccesses = 3;      // a result is written once and read about twice
constexpr double kUpdate = 1.8;      // an update reads everything and writes most of it
constexpr double kHostRate = 6.2e9;  // elements per second that 16 cores update with AdamW

double products_time(const DryRun& run, const Gpu& gpu) {
  double peak = (run.element < 4 ? gpu.tflops : gpu.tflops_fp32) * 1e12 * kProducts;
  double bandwidth = gpu.bandwidth * 1e9 * kBandwidth, seconds = 0;
  for (const auto& product : run.products)
    seconds += std::max(product.flops / (peak * product.speed), product.bytes / bandwidth);
  return seconds;
}

// A ring over several nodes uses all network cards of each node at once.
double speed_within(int64_t ranks, const PlanOptions& options, const Gpu& gpu) {
  double link = gpu.link;
  if (ranks > options.ranks_per_node) link = std::min(link, gpu.network * options.ranks_per_node);
  return link * 1e9 * kLinks;
}

double communication_time(const DryRun& run, const PlanOptions& options, const Gpu& gpu) {
  auto moved = static_cast<double>(run.traffic.all_gather + run.traffic.reduce_scatter);
  auto reduced = static_cast<double>(run.traffic.all_reduce);
  double seconds = moved / speed_within(run.shard_ranks, options, gpu);
  if (reduced > 0)  // replicas in other nodes are reached by one card per rank
    seconds += reduced / (run.shard_ranks > 1 ? gpu.network * 1e9 * kLinks
                                              : speed_within(options.world, options, gpu));
  double nodes = std::ceil(double(options.world) / options.ranks_per_node);
  double calls = 0;
  for (const auto& unit : run.units) calls += unit.root ? 2 : 3;
  if (options.world > 1) seconds += calls * (kLatency + kPerNode * (nodes - 1));
  return seconds;
}

}  // namespace

PlannedTime time_of(const DryRun& run, const PlannedMemory& kinds, const PlanOptions& options) {
  PlannedTime time;
  if (!options.gpu) return time;
  const Gpu& gpu = *options.gpu;
  double bandwidth = gpu.bandwidth * 1e9 * kBandwidth;
  time.compute =
      products_time(run, gpu) + kAccesses * static_cast<double>(run.allocated) / bandwidth;
  time.compute *= run.times;
  time.communication = run.times * communication_time(run, options, gpu);

  const Offload& offload = options.shard.offload;
  bool host_update = offload.optimizer || !offload.directory.empty();
  double share = host_update ? offloaded_share(run, offload) : 0;
  auto updated =
      static_cast<double>(kinds.parameters + kinds.master + kinds.gradients + kinds.states);
  time.optimizer = (1 - share) * kUpdate * updated / bandwidth;
  // Once per step, however many micro-batches it has.
  time.optimizer +=
      static_cast<double>(run.traffic.all_to_all) / speed_within(run.shard_ranks, options, gpu);
  double host_link = gpu.host_link * 1e9 * kHostLink;
  double elements = static_cast<double>(run.parameters) / static_cast<double>(run.shard_ranks);
  if (host_update) {
    // Gradients are copied out during backward; the update and the copy back wait for the last.
    double back = share * static_cast<double>(kinds.parameters) / host_link, disk = 0;
    if (!offload.directory.empty())
      disk = 2 * share * static_cast<double>(kinds.master + kinds.states) *  // in and out
             std::min(options.ranks_per_node, options.world) / (options.disk_speed * 1e9);
    time.offload = std::max({share * elements / kHostRate, back, disk});
  } else {
    // The device updates: its inputs are copied in, and the parameters back out.
    double visits = (offload.parameters ? 2 * static_cast<double>(kinds.parameters) : 0) +
                    (offload.gradients ? static_cast<double>(kinds.gradients) : 0);
    time.offload = offloaded_share(run, offload) * visits / host_link;
  }
  // Activations are copied out during forward and back during backward, which takes twice as long.
  double way = run.times * static_cast<double>(run.moved) / host_link;
  time.offload +=
      std::max(0.0, way - 0.9 * time.compute / 3) + std::max(0.0, way - 0.9 * time.compute * 2 / 3);
  const double offloaded = offloaded_share(run, offload);
  if (offload.gradients || host_update)  // later micro-batches copy them back to accumulate
    time.communication += offloaded * (2 * options.micro_batches - 1) *
                          static_cast<double>(kinds.gradients) / host_link;
  if (offload.parameters)  // every gather starts with a copy
    time.communication +=
        offloaded * 2 * options.micro_batches * static_cast<double>(kinds.parameters) / host_link;

  hide_communication(time, static_cast<int64_t>(run.units.size()));
  return time;
}

void hide_communication(PlannedTime& time, int64_t units) {
  // The first gather and the last reduction have nothing to hide behind.
  double ends = time.communication / static_cast<double>(std::max<int64_t>(1, units));
  time.exposed = std::max(ends, time.communication - 0.9 * time.compute);
}

}  // namespace fsdp::memory
