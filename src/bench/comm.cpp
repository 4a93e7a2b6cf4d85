// fsdp bench comm: times all-gather and reduce-scatter over sizes for each backend, compared with a
// plain copy of the same bytes, and with torch's Gloo if a Python has torch.
//
// The command launches its own ranks (fsdp run for shm and nccl, mpirun for mpi), which run it
// again with --worker. Rank 0 prints one JSON object per measurement; the parent makes the table.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstring>
#include <iostream>

#include "base/log.h"
#include "base/subprocess.h"
#include "base/table.h"
#include "bench/benchmarks.h"
#include "bench/peers.h"
#include "cli/program.h"
#include "fsdp/fsdp.h"

namespace fsdp::bench {
namespace {

using std::chrono::steady_clock;

struct CollectiveOptions {
  std::vector<std::string> backends;
  int ranks = 2;
  std::string smallest = "1K", largest = "256M";
  bool no_peer = false;
  bool json = false;
  bool worker = false;
};

int64_t parse_size(const std::string& text) {
  size_t used = 0;
  double value = 0;
  try {
    value = std::stod(text, &used);
  } catch (const std::exception&) {
  }
  std::string unit = text.substr(used);
  for (const char* suffix : {"iB", "B", "b", "ib"})
    if (unit.size() > 1 && unit.ends_with(suffix)) unit.resize(unit.size() - std::strlen(suffix));
  int64_t scale = unit.empty() || unit == "B"  ? 1
                  : unit == "K" || unit == "k" ? 1 << 10
                  : unit == "M" || unit == "m" ? 1 << 20
                  : unit == "G" || unit == "g" ? 1 << 30
                                               : 0;
  if (used == 0 || scale == 0 || value <= 0)
    throw Error("\"" + text + "\" isn't a size.", "write bytes with K, M or G: 16K, 64M, 1G.");
  return static_cast<int64_t>(value * static_cast<double>(scale));
}

std::vector<int64_t> sizes(const CollectiveOptions& options) {
  int64_t from = parse_size(options.smallest), to = parse_size(options.largest);
  if (from > to || from < 64)
    throw Error("--from " + options.smallest + " --to " + options.largest + " isn't a range.",
                "--from must be at least 64 bytes and at most --to.");
  std::vector<int64_t> all;
  for (int64_t size = from; size <= to; size *= 4) all.push_back(size);
  if (all.back() != to) all.push_back(to);
  return all;
}

// --- a rank ---

// Seconds per call of `body`. On a GPU: by its events, over several calls in a row, so that the
// launch of the first doesn't count.
double seconds_per_call(const std::function<void()>& body, at::Device device) {
  if (device.is_cpu()) {
    auto start = steady_clock::now();
    body();
    return std::chrono::duration<double>(steady_clock::now() - start).count();
  }
  c10::impl::VirtualGuardImpl gpu(device.type());
  c10::Event begin(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  c10::Event end(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  constexpr int kInARow = 8;
  body();
  begin.record(gpu.getStream(device));
  for (int i = 0; i < kInARow; ++i) body();
  end.record(gpu.getStream(device));
  end.synchronize();
  return begin.elapsedTime(end) / 1e3 / kInARow;
}

// The median over repetitions; all ranks start each together.
double median_seconds(const World& world, int repetitions, const std::function<void()>& body) {
  std::vector<double> times;
  for (int i = -3; i < repetitions; ++i) {
    world.comm().barrier();
    double took = seconds_per_call(body, world.device());
    if (i >= 0) times.push_back(took);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

int run_comm_worker(const CollectiveOptions& options) {
  World world = init({.backend = options.backends.at(0)});
  const Communicator& comm = world.comm();
  at::set_num_threads(1);
  bool cpu = world.device().is_cpu();
  auto plain = at::TensorOptions().dtype(at::kFloat).device(world.device());
  for (int64_t bytes : sizes(options)) {
    int64_t part = std::max<int64_t>(1, bytes / 4 / world.size()), full = part * world.size();
    int repetitions = !cpu || bytes > (1 << 22) ? 11 : 101;
    at::Tensor from = at::zeros({full}, plain), to = at::zeros({full}, plain);
    auto time = [&](const std::function<void()>& body) {
      return median_seconds(world, repetitions, body);
    };
    double copy = time([&] {
      if (cpu)
        std::memcpy(to.data_ptr(), from.data_ptr(), full * 4);
      else
        to.copy_(from);
    });
    auto report = [&](const char* operation, const char* buffers, double seconds) {
      if (world.rank() != 0) return;
      double moved = static_cast<double>(full * 4);
      std::cout << Json{{"backend", world.backend()},
                        {"ranks", world.size()},
                        {"bytes", full * 4},
                        {"operation", operation},
                        {"buffers", buffers},
                        {"time_us", seconds * 1e6},
                        {"gb_s", moved / seconds / 1e9},
                        {"copy_us", copy * 1e6},
                        {"share_of_copy", copy / seconds}}
                       .dump()
                << std::endl;
    };
    bool shared = world.backend() == "shm";
    at::Tensor own = at::zeros({part}, plain), sum = at::zeros({part}, plain);
    report("all_gather", "private", time([&] { comm.all_gather(to, own); }));
    if (shared) {
      at::Tensor window = comm.gather_buffer(full, at::kFloat, world.device());
      at::Tensor mine = window.narrow(0, world.rank() * part, part);
      report("all_gather", "shared", time([&] { comm.all_gather(window, mine); }));
    }
    report("reduce_scatter", "private", time([&] { comm.reduce_scatter(sum, from); }));
    if (shared) {
      at::Tensor gradients = comm.reduce_buffer(full, at::kFloat, world.device());
      report("reduce_scatter", "shared", time([&] { comm.reduce_scatter(sum, gradients); }));
    }
  }
  world.comm().barrier();
  return 0;
}

// --- the parent ---

std::vector<std::string> worker_command(const CollectiveOptions& options,
                                        const std::string& backend) {
  std::string n = std::to_string(options.ranks);
  std::vector<std::string> command;
  if (backend == "mpi")
    command = {"mpirun", "-n", n, "--oversubscribe"};
  else
    command = {cli::beside("fsdp"), "run", "-n", n, "--no-prefix", "--"};
  for (const std::string& word :
       {own_binary(), std::string("comm"), std::string("--worker"), std::string("--backend"),
        backend, std::string("--from"), options.smallest, std::string("--to"), options.largest})
    command.push_back(word);
  return command;
}

std::vector<Json> measure_comm(const std::vector<std::string>& command, const std::string& what) {
  std::vector<Json> lines;
  bool shown = isatty(2);
  auto on_line = [&](const std::string& line) {
    Json parsed = Json::parse(line, nullptr, false);
    if (!parsed.is_object()) return;
    lines.push_back(parsed);
    if (shown)
      std::cerr << "\r" << what << ": " << human_bytes(parsed["bytes"].get<double>()) << "        ";
  };
  Finished finished =
      run_program(command, /*quiet=*/false, on_line,
                  {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}});
  if (shown) std::cerr << "\r" << std::string(40, ' ') << "\r";
  if (finished.code == 127 && command[0] == "mpirun")
    throw Error("mpirun was not found.", "install openmpi-bin, or leave mpi out of --backend.");
  if (finished.code != 0)
    throw Error("the ranks of " + what + " exited with code " + std::to_string(finished.code) + ".",
                "their own errors are above.");
  return lines;
}

// Gloo's microseconds by "operation bytes"; empty if no Python has torch.
std::map<std::string, double> measure_gloo(const CollectiveOptions& options) {
  const std::string script = peer_script("peer_gloo.py");
  const auto python = script.empty() ? std::nullopt : python_with_torch("Gloo is");
  if (!python) return {};
  const std::string n = std::to_string(options.ranks);
  std::vector<std::string> command = {cli::beside("fsdp"), "run", "-n",    n,
                                      "--no-prefix",       "--",  *python, script};
  for (int64_t bytes : sizes(options)) command.push_back(std::to_string(bytes));
  std::map<std::string, double> times;
  for (const Json& line : measure_comm(command, "gloo"))
    for (const char* operation : {"all_gather", "reduce_scatter"})
      times[operation + std::to_string(line["bytes"].get<int64_t>())] =
          line[std::string(operation) + "_us"].get<double>();
  return times;
}

int run_comm_parent(CollectiveOptions options) {
  for (const std::string& backend : options.backends)
    if (backend != "shm" && backend != "mpi" && backend != "nccl")
      throw Error("there is no backend \"" + backend + "\" to measure.",
                  "choose from shm, mpi and nccl, separated by commas.");
  sizes(options);  // refuse before anything starts
  if (options.ranks < 1)
    throw Error("--ranks " + std::to_string(options.ranks) + " is too few.", "give 1 or more.");
  bool cpu =
      std::find(options.backends.begin(), options.backends.end(), "nccl") == options.backends.end();
  auto gloo = !options.no_peer && cpu && options.ranks > 1 ? measure_gloo(options)
                                                           : std::map<std::string, double>{};
  Table table({{"backend", "backend", Table::kLeft},
               {"ranks", "ranks"},
               {"bytes", "size"},
               {"operation", "operation", Table::kLeft},
               {"buffers", "buffers", Table::kLeft},
               {"time_us", "time us"},
               {"gb_s", "GB/s"},
               {"copy_us", "copy us"},
               {"share_of_copy", "of copy"},
               {"gloo_us", gloo.empty() ? "" : "gloo us"},
               {"times_gloo", gloo.empty() ? "" : "x gloo"}});
  for (const std::string& backend : options.backends) {
    for (const Json& row : measure_comm(worker_command(options, backend), backend)) {
      auto real = [&](const char* key, int digits) {
        return number(row[key].get<double>(), digits);
      };
      double us = row["time_us"].get<double>();
      int64_t bytes = row["bytes"].get<int64_t>();
      auto peer = gloo.find(row["operation"].get<std::string>() + std::to_string(bytes));
      bool beside = peer != gloo.end();
      bool free = row["buffers"] == "shared" && row["operation"] == "all_gather";
      Cell share = free ? Cell{row["share_of_copy"], "no copy"} : real("share_of_copy", 2);
      Cell rate = free ? Cell{row["gb_s"], "-"} : real("gb_s", 2);
      table.add({text(row["backend"]),
                 {row["ranks"], std::to_string(row["ranks"].get<int>())},
                 {bytes, human_bytes(static_cast<double>(bytes))},
                 text(row["operation"]),
                 text(row["buffers"]),
                 real("time_us", 1),
                 rate,
                 real("copy_us", 1),
                 share,
                 beside ? number(peer->second, 1) : Cell{nullptr, "-"},
                 beside ? number(peer->second / us, 1) : Cell{nullptr, "-"}});
    }
  }
  table.print(std::cout, options.json);
  if (!options.json)
    std::cout << "\nGB/s: bytes of the full buffer per second. copy: every rank copies the same "
                 "number of "
                 "bytes at once.\nshared: buffers that every rank has mapped (gather_buffer, "
                 "reduce_buffer); an all-gather there waits but copies nothing.\n";
  return 0;
}

}  // namespace

void add_comm(CLI::App& bench, Action& action) {
  auto options = std::make_shared<CollectiveOptions>();
  CLI::App* command = bench.add_subcommand(
      "comm", "Time all-gather and reduce-scatter over sizes, beside a plain copy and Gloo");
  command
      ->add_option("--backend", options->backends, "shm, mpi or nccl; several separated by commas")
      ->delimiter(',')
      ->default_val(std::vector<std::string>{"shm"});
  command->add_option("--ranks", options->ranks, "Ranks on this host")->capture_default_str();
  command->add_option("--from", options->smallest, "Smallest full buffer: 1K, 64M, 1G")
      ->capture_default_str();
  command->add_option("--to", options->largest, "Largest full buffer")->capture_default_str();
  command->add_flag("--no-peer", options->no_peer, "Without Gloo");
  command->add_flag("--json", options->json, "One JSON object per line");
  command->add_flag("--worker", options->worker, "")->group("");  // a rank of the above
  command->footer(
      "Examples:\n  fsdp bench comm\n  fsdp bench comm --backend shm,mpi --ranks 4 --to 64M\n"
      "  fsdp bench comm --backend nccl --ranks 2 --json");
  command->callback([options, &action] {
    action = [options] {
      return options->worker ? run_comm_worker(*options) : run_comm_parent(*options);
    };
  });
}

}  // namespace fsdp::bench
