// fsdp bench nvme: updates of optimizer state on a disk, compared with what the disk gives to a
// plain loop.
//
// In the plain loop a few threads each read or write the next piece of a file, past the page cache,
// until the file is done. Its third form, "both", reads and writes the file at once: the least that
// an update of state on a disk must do. An update through our store (12 bytes per parameter in, 12
// out) is shown as a share of that.
#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/rand.h>

#include "bench/harness.h"
#include "disk/state_store.h"
#include "fsdp/error.h"
#include "kernels/update.h"

namespace fsdp::bench {
namespace {

constexpr int kTensors = 3;         // master, exp_avg, exp_avg_sq
constexpr int64_t kUnitBytes = 12;  // per parameter

struct NvmeOptions {
  std::string dir = ".";
  double size = 4;    // GB of state
  int64_t piece = 2;  // MiB
  int depth = 32;
  int64_t unit = 4;  // Mi parameters
  int buffers = 3;
  int rounds = 3;
  bool json = false, page_cache = false;
};

// The first call isn't timed: the first write of a file's blocks costs more.
double median_seconds(const NvmeOptions& options, const Work& work) {
  return median_of(options.rounds, /*warmup=*/1, [&] { return seconds_of(work); });
}

disk::EngineOptions engine_options(const NvmeOptions& options, bool uring) {
  return {options.piece << 20, options.depth, uring, /*threads=*/options.depth};
}

// A line for each form of the plain loop.
Lines time_plain_loop(const NvmeOptions& options, const disk::ScratchFile& file) {
  const disk::EngineOptions how = engine_options(options, /*uring=*/false);
  const disk::Memory memory = disk::huge_pages(how.piece * how.depth);
  if (!memory) throw Error("there is no memory for the pieces.", "lower --piece or --depth.");
  at::from_blob(memory.get(), how.piece * how.depth, at::kByte).random_();  // disks may compress
  const auto engine = disk::make_thread_engine(file, how);
  using enum disk::Direction;
  const auto seconds = [&](const std::vector<disk::Direction>& directions) {
    return median_seconds(options, [&] {
      std::vector<disk::Ticket> tickets;
      for (int64_t at = 0; at < file.bytes(); at += how.piece)
        for (const disk::Direction direction : directions) {
          const int64_t slot = static_cast<int64_t>(tickets.size()) % how.depth;
          tickets.push_back(engine->start(direction, at, memory.get() + slot * how.piece,
                                          std::min(how.piece, file.bytes() - at)));
        }
      for (const disk::Ticket& ticket : tickets) engine->wait(ticket);
    });
  };
  const double write = seconds({kWrite});  // first: the file has no contents yet
  return {{{"what", "plain loop: read"}, {"seconds", seconds({kRead})}},
          {{"what", "plain loop: write"}, {"seconds", write}},
          {{"what", "plain loop: both"}, {"seconds", seconds({kRead, kWrite})}}};
}

// Steps of the store that change nothing, and with AdamW: a line for each.
Lines time_updates(const NvmeOptions& options, bool uring) {
  const int64_t parameters = static_cast<int64_t>(options.size * 1e9) / kUnitBytes;
  const int64_t unit = std::min(options.unit << 20, parameters);
  std::vector<std::vector<int64_t>> entries;
  for (int64_t begin = 0; begin < parameters; begin += unit)
    entries.emplace_back(kTensors, std::min(unit, parameters - begin) * 4);
  disk::StateStore store(
      options.dir, entries,
      {options.buffers, /*direct=*/!options.page_cache, engine_options(options, uring)});

  using Slices = std::vector<at::Tensor>;  // master, exp_avg, exp_avg_sq
  using Update = std::function<void(const Slices&)>;
  const auto step = [&](const Update& work) {
    for (size_t i = 0; i < entries.size(); ++i) {
      Slices slices;
      for (char* tensor : store.get(static_cast<int>(i)))
        slices.push_back(at::from_blob(tensor, {entries[i][0] / 4}, at::TensorOptions(at::kFloat)));
      work(slices);
      store.put(static_cast<int>(i));
    }
    store.flush();
  };
  step([](const Slices& slices) {
    for (const at::Tensor& tensor : slices) tensor.uniform_();
  });
  const std::string engine = store.engine();
  Lines lines;
  const auto time = [&](const char* what, const Update& work) {
    const double seconds = median_seconds(options, [&] { step(work); });
    lines.push_back({{"what", what + engine}, {"seconds", seconds}, {"engine", engine}});
  };
  time("read and write state, ", [](const Slices&) {});
  time("with AdamW, ", [grad = at::rand({unit})](const Slices& slices) {
    const at::Tensor part = grad.narrow(0, 0, slices[0].numel());
    kernels::adamw(slices[0], part, slices[1], slices[2], {}, {}, {});
  });
  const disk::StoreCounts counts = store.counts();
  const double ahead = static_cast<double>(counts.ahead) / static_cast<double>(counts.gets);
  for (Json& line : lines) line.update({{"ahead", ahead}, {"memory", store.bytes_in_memory()}});
  return lines;
}

int run_nvme(NvmeOptions options) {
  const double state = options.size * 1e9;
  auto file = std::make_unique<disk::ScratchFile>(options.dir, static_cast<int64_t>(state),
                                                  !options.page_cache);
  const bool direct = file->direct();
  Lines lines = time_plain_loop(options, *file);
  file.reset();
  const std::string why_not =
      direct ? disk::why_no_uring() : "the file goes through the page cache";
  if (why_not.empty()) append(lines, time_updates(options, /*uring=*/true));
  append(lines, time_updates(options, /*uring=*/false));
  const double both = lines[2]["seconds"];
  for (Json& line : lines) {
    const double seconds = line["seconds"];
    const bool one_way = &line < &lines[2];
    line["gb_per_s"] = (one_way ? 1 : 2) * state / seconds / 1e9;
    if (line.contains("engine")) line["share"] = both / seconds;
  }
  Strings notes = {
      formatted("{} of state ({} parameters) in {}, {}; pieces of {} MiB, {} at a time; medians of "
                "{} rounds.",
                human_bytes(state), with_separators(static_cast<int64_t>(state) / kUnitBytes),
                options.dir,
                direct ? "past the page cache (O_DIRECT)"
                       : "through the page cache, which is told to drop everything",
                options.piece, options.depth, options.rounds),
      formatted("The store held {} of memory. AdamW ran on {}.",
                human_bytes(lines.back()["memory"]), count_of(at::get_num_threads(), "thread"))};
  if (!why_not.empty()) notes.push_back(formatted("io_uring isn't used: {}.", why_not));
  return print("what; seconds=s .3; gb_per_s=GB/s .2; share=of plain loop .2; engine=; ahead= .2",
               lines, notes, options.json);
}

}  // namespace

void add_nvme(CLI::App& bench, cli::Action& action) {
  auto options = std::make_shared<NvmeOptions>();
  Flags flags(bench, "nvme",
              "Measure updates of optimizer state on a disk, as a share of the disk's bandwidth",
              options->json,
              "  fsdp bench nvme --dir /mnt/nvme --size 16\n"
              "  fsdp bench nvme --dir /mnt/nvme --piece 4 --depth 64");
  flags.any("--dir", options->dir, "Directory on the disk to measure", "DIR");
  flags.number("--size", options->size, "GB of state; the disk needs as much free space", 0.001,
               1e5, "GB");
  flags.number("--piece", options->piece, "MiB per read or write", 1, 64);
  flags.number("--depth", options->depth, "Pieces in flight", 2, 256);
  flags.number("--unit", options->unit,
               "Parameters per unit, in Mi; a unit is in memory as a whole", 1, 4096);
  flags.number("--buffers", options->buffers, "Units in memory at once", 2, 64);
  flags.number("--rounds", options->rounds, "Rounds; the table shows medians", 1, 1000);
  flags.flag("--page-cache", options->page_cache, "Use the page cache instead of O_DIRECT");
  flags.runs(action, options, run_nvme);
}

}  // namespace fsdp::bench
