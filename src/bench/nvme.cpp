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
#include <sys/mman.h>

#include <atomic>
#include <future>
#include <iostream>
#include <system_error>

#include "base/format.h"
#include "bench/benchmarks.h"
#include "bench/flags.h"
#include "disk/state_store.h"
#include "fsdp/error.h"
#include "kernels/update.h"

namespace fsdp::bench {
namespace {

using disk::Direction;

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

double median_of(int rounds, const std::function<void()>& work) {
  work();  // not timed: the first write of a file's blocks costs more
  std::vector<double> seconds;
  for (int round = 0; round < rounds; ++round) seconds.push_back(seconds_of(work));
  return median(seconds);
}

// --- the plain loop ---

void transfer(const disk::ScratchFile& file, Direction direction, int64_t offset, char* memory,
              int64_t bytes) {
  for (int64_t at = 0; at < bytes;) {
    const int64_t came = disk::transfer_once(file, direction, offset + at, memory + at, bytes - at);
    if (came == -EINTR) continue;
    if (came <= 0)
      throw Error(
          formatted("{}: {} at {}.", file.path(),
                    std::generic_category().message(came < 0 ? static_cast<int>(-came) : EIO),
                    with_separators(offset + at)),
          "choose another directory with --dir.");
    at += came;
  }
}

using Memory = std::unique_ptr<char, void (*)(void*)>;

// A thread's memory, filled with noise: some disks compress.
Memory make_memory(int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  Memory memory(static_cast<char*>(std::aligned_alloc(2 << 20, size)), std::free);
  if (!memory)
    throw Error(formatted("can't allocate {}.", human_bytes(static_cast<double>(bytes))),
                "lower --depth.");
  ::madvise(memory.get(), size, MADV_HUGEPAGE);  // as the store's is
  at::from_blob(memory.get(), {bytes}, at::TensorOptions(at::kByte)).random_();
  return memory;
}

// Every thread reads the file or writes it, `writers` of them.
void plain_loop(const disk::ScratchFile& file, size_t writers, const std::vector<Memory>& memory,
                int64_t piece) {
  std::atomic<int64_t> next[2] = {0, 0};  // next to read, next to write
  std::vector<std::future<void>> threads;
  for (size_t i = 0; i < memory.size(); ++i)
    threads.push_back(std::async(std::launch::async, [&, i] {
      const bool writes = i < writers;
      const auto direction = writes ? Direction::kWrite : Direction::kRead;
      for (int64_t at = 0; (at = next[writes].fetch_add(piece)) < file.bytes();)
        transfer(file, direction, at, memory[i].get(), std::min(piece, file.bytes() - at));
    }));
  for (std::future<void>& thread : threads) thread.get();  // throws what a thread threw
}

// --- the store ---

// Steps of the store that change nothing, and with AdamW: a line for each.
std::vector<Json> time_updates(const NvmeOptions& options, bool uring, double& memory) {
  const int64_t parameters = static_cast<int64_t>(options.size * 1e9) / kUnitBytes;
  const int64_t unit = std::min(options.unit << 20, parameters);
  std::vector<std::vector<int64_t>> entries;
  for (int64_t begin = 0; begin < parameters; begin += unit)
    entries.emplace_back(kTensors, std::min(unit, parameters - begin) * 4);
  disk::StoreOptions chosen{.buffers = options.buffers, .direct = !options.page_cache};
  chosen.engine.piece = options.piece << 20;
  chosen.engine.depth = chosen.engine.threads = options.depth;
  chosen.engine.uring = uring;
  disk::StateStore store(options.dir, entries, chosen);

  using Slices = std::vector<at::Tensor>;  // master, exp_avg, exp_avg_sq
  const auto step = [&](const std::function<void(const Slices&)>& work) {
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
  memory = static_cast<double>(store.bytes_in_memory());
  const double moved = median_of(options.rounds, [&] { step([](const Slices&) {}); });
  const at::Tensor grad = at::rand({unit});
  const double updated = median_of(options.rounds, [&] {
    step([&](const Slices& slices) {
      kernels::adamw(slices[0], grad.narrow(0, 0, slices[0].numel()), slices[1], slices[2], {}, {},
                     {});
    });
  });
  const std::string engine = store.engine();
  const double ahead =
      static_cast<double>(store.counts().ahead) / static_cast<double>(store.counts().gets);
  const auto line = [&](const char* what, double seconds) {
    return Json{
        {"what", what + engine}, {"seconds", seconds}, {"engine", engine}, {"ahead", ahead}};
  };
  return {line("read and write state, ", moved), line("with AdamW, ", updated)};
}

int run_nvme(const NvmeOptions& options) {
  const double state = options.size * 1e9;
  std::vector<Json> lines;
  bool direct = false;
  {
    const disk::ScratchFile file(options.dir, static_cast<int64_t>(state), !options.page_cache);
    direct = file.direct();
    const int64_t piece = options.piece << 20;
    std::vector<Memory> memory;
    for (int i = 0; i < options.depth; ++i) memory.push_back(make_memory(piece));
    const auto add = [&](const char* what, size_t writers) {
      const auto loop = [&] { plain_loop(file, writers, memory, piece); };
      lines.push_back({{"what", what}, {"seconds", median_of(options.rounds, loop)}});
    };
    add("plain loop: write", memory.size());
    add("plain loop: read", 0);
    add("plain loop: both", memory.size() / 2);
    std::swap(lines[0], lines[1]);  // written first, shown second
  }
  const std::string why_not =
      direct ? disk::why_no_uring() : "the file goes through the page cache";
  double memory = 0;
  if (why_not.empty()) append(lines, time_updates(options, /*uring=*/true, memory));
  append(lines, time_updates(options, /*uring=*/false, memory));
  const double both = lines[2]["seconds"];
  for (Json& line : lines) {
    const double seconds = line["seconds"];
    const bool one_way = &line < &lines[2];
    line["gb_per_s"] = (one_way ? 1 : 2) * state / seconds / 1e9;
    if (line.contains("engine")) line["share"] = both / seconds;
  }
  table_of({{"what", "what", kWords},
            {"seconds", "s", 3},
            {"gb_per_s", "GB/s", 2},
            {"share", "of plain loop", 2},
            {"engine", "", kWords},
            {"ahead", "", 2}},
           lines)
      .print(std::cout, options.json);
  if (options.json) return 0;
  std::cout << formatted(
      "\n{} of state ({} parameters) in {}, {}; pieces of {} MiB, {} at a time; medians of {} "
      "rounds.\nThe store held {} of memory. AdamW ran on {}.\n",
      human_bytes(state), with_separators(static_cast<int64_t>(state) / kUnitBytes), options.dir,
      direct ? "past the page cache (O_DIRECT)"
             : "through the page cache, which is told to drop everything",
      options.piece, options.depth, options.rounds, human_bytes(memory),
      counted(at::get_num_threads(), "thread"));
  if (!why_not.empty()) std::cout << formatted("io_uring isn't used: {}.\n", why_not);
  return 0;
}

}  // namespace

void add_nvme(CLI::App& bench, Action& action) {
  auto options = std::make_shared<NvmeOptions>();
  CLI::App* command = bench.add_subcommand(
      "nvme", "Measure updates of optimizer state on a disk, as a share of the disk's bandwidth");
  command->add_option("--dir", options->dir, "Directory on the disk to measure")
      ->type_name("DIR")
      ->capture_default_str();
  command->add_option("--size", options->size, "GB of state; the disk needs as much free space")
      ->check(CLI::Range(0.001, 100000.0).description(""))
      ->type_name("GB")
      ->capture_default_str();
  add_count(*command, "--piece", options->piece, "MiB per read or write", 1, 64);
  add_count(*command, "--depth", options->depth, "Pieces in flight", 2, 256);
  add_count(*command, "--unit", options->unit,
            "Parameters per unit, in Mi; a unit is in memory as a whole", 1, 4096);
  add_count(*command, "--buffers", options->buffers, "Units in memory at once", 2, 64);
  add_count(*command, "--rounds", options->rounds, "Rounds; the table shows medians", 1, 1000);
  command->add_flag("--page-cache", options->page_cache, "Use the page cache instead of O_DIRECT");
  add_json(*command, options->json);
  command->footer(
      "Examples:\n  fsdp bench nvme --dir /mnt/nvme --size 16\n"
      "  fsdp bench nvme --dir /mnt/nvme --piece 4 --depth 64");
  command->callback([options, &action] { action = [options] { return run_nvme(*options); }; });
}

}  // namespace fsdp::bench
