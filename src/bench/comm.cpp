// fsdp bench comm: times all-gather and reduce-scatter over sizes for each backend, compared with a
// plain copy of the same bytes, and with torch's Gloo if a Python has torch.
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>
#include <cstring>

#include "base/subprocess.h"
#include "bench/harness.h"
#include "fsdp/communicator.h"
#include "fsdp/error.h"

namespace fsdp::bench {
namespace {

struct CommRow {
  Machine on = {.ranks = 2};
  std::string smallest = "1K", largest = "256M";
  // For the parent only:
  Strings backends = {"shm"};
  bool no_peer = false, json = false;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(CommRow, on, smallest, largest)

int64_t size_of(const std::string& text) {
  if (const auto bytes = parse_bytes(text, /*kilo=*/1024)) return *bytes;
  throw Error(formatted("\"{}\" isn't a size.", text), "write bytes with K, M or G: 16K, 64M, 1G.");
}

std::vector<int64_t> sizes(const CommRow& row) {
  const int64_t from = size_of(row.smallest), to = size_of(row.largest);
  if (from > to || from < 64)
    throw Error(formatted("--from {} --to {} isn't a range.", row.smallest, row.largest),
                "--from must be at least 64 bytes and at most --to.");
  std::vector<int64_t> all;
  for (int64_t size = from; size <= to; size *= 4) all.push_back(size);
  if (all.back() != to) all.push_back(to);
  return all;
}

// Seconds per call of `body`. On a GPU: by its events, over several calls in a row, so that the
// launch of the first doesn't count.
double seconds_per_call(const Work& body, at::Device device) {
  if (device.is_cpu()) return seconds_of(body);
  const c10::impl::VirtualGuardImpl gpu(device.type());
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

// Both collectives on full buffers of each size, beside a copy of one.
Lines time_collectives(const CommRow& row, const World& world) {
  const Communicator& comm = world.comm();
  const bool cpu = world.device().is_cpu(), shared = world.backend() == "shm";
  const auto zeros = [&](int64_t numel) {
    return at::zeros({numel}, at::TensorOptions(at::kFloat).device(world.device()));
  };
  Lines lines;
  for (const int64_t bytes : sizes(row)) {
    const int64_t part = std::max<int64_t>(1, bytes / 4 / world.size()), full = part * world.size();
    const auto time = [&](const Work& body) {
      return median_of(/*rounds=*/!cpu || bytes > (1 << 22) ? 11 : 101, /*warmup=*/3, [&] {
        comm.barrier();
        return seconds_per_call(body, world.device());
      });
    };
    const at::Tensor from = zeros(full), to = zeros(full), own = zeros(part), sum = zeros(part);
    const double copy = time([&] {
      if (cpu)
        std::memcpy(to.data_ptr(), from.data_ptr(), from.nbytes());
      else
        to.copy_(from);
    });
    const auto report = [&](const char* operation, const char* buffers, const Work& body) {
      const double seconds = time(body);
      lines.push_back({{"backend", world.backend()},
                       {"ranks", world.size()},
                       {"bytes", full * 4},
                       {"operation", operation},
                       {"buffers", buffers},
                       {"time_us", seconds * 1e6},
                       {"gb_s", static_cast<double>(full * 4) / seconds / 1e9},
                       {"copy_us", copy * 1e6},
                       {"share_of_copy", copy / seconds}});
    };
    report("all_gather", "private", [&] { comm.all_gather(to, own); });
    if (shared) {
      const at::Tensor window = comm.gather_buffer(full, at::kFloat, world.device());
      const at::Tensor mine = window.narrow(0, world.rank() * part, part);
      report("all_gather", "shared", [&] { comm.all_gather(window, mine); });
    }
    report("reduce_scatter", "private", [&] { comm.reduce_scatter(sum, from); });
    if (shared) {
      const at::Tensor gradients = comm.reduce_buffer(full, at::kFloat, world.device());
      report("reduce_scatter", "shared", [&] { comm.reduce_scatter(sum, gradients); });
    }
  }
  return lines;
}

Lines run_backend(const CommRow& row) {
  if (row.on.backend != "mpi") return run_ours("comm", row, row.on.backend);
  if (run_program({"mpirun", "--version"}).code == 127)
    throw Error("mpirun was not found.", "install openmpi-bin, or leave mpi out of --backend.");
  cli::Ranks ranks = {row.on.ranks, row.on.threads, rank_program("comm", row), "mpi"};
  ranks.launcher = {"env", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"};
  append(ranks.launcher, {"mpirun", "-n", std::to_string(row.on.ranks), "--oversubscribe"});
  return run_ranks(ranks);
}

// Gloo's microseconds, a line for each size; empty if no Python has torch.
Lines run_gloo(const CommRow& row) {
  const auto python = python_with_torch("Gloo is");
  if (!python) return {};
  std::string bytes;
  for (const int64_t size : sizes(row)) bytes += std::to_string(size) + " ";
  return run_ranks({row.on.ranks, 1, peer_program(python, "peer_gloo.py", bytes), "gloo"});
}

int run_comm(CommRow row) {
  bool peer = !row.no_peer && row.on.ranks > 1;
  for (const std::string& backend : row.backends) {
    if (backend != "shm" && backend != "mpi" && backend != "nccl")
      throw Error(formatted("there is no backend \"{}\" to measure.", backend),
                  "choose from shm, mpi and nccl, separated by commas.");
    peer = peer && backend != "nccl";
  }
  sizes(row);  // refuse before anything starts
  if (row.on.ranks < 1)
    throw Error(formatted("--ranks {} is too few.", row.on.ranks), "give 1 or more.");
  const Lines gloo = peer ? run_gloo(row) : Lines();
  Lines lines;
  for (const std::string& backend : row.backends) {
    row.on.backend = backend;
    append(lines, run_backend(row));
  }
  for (Json& line : lines) {
    if (line["buffers"] == "shared" && line["operation"] == "all_gather")
      line.update({{"share_of_copy_text", "no copy"}, {"gb_s_text", "-"}});
    double us = std::nan("");
    for (const Json& theirs : gloo)
      if (theirs["bytes"] == line["bytes"])
        us = theirs[line["operation"].get<std::string>() + "_us"];
    line.update({{"gloo_us", us}, {"times_gloo", us / line["time_us"].get<double>()}});
  }
  return print(
      formatted("backend; ranks .0; bytes=size B; operation; buffers; time_us .1; gb_s=GB/s .2; "
                "copy_us .1; share_of_copy=of copy .2; gloo_us={} .1; times_gloo={} .1",
                gloo.empty() ? "" : "gloo us", gloo.empty() ? "" : "x gloo"),
      lines,
      {"GB/s: bytes of the full buffer per second. copy: every rank copies the same number of "
       "bytes at once.",
       "shared: buffers that every rank has mapped (gather_buffer, reduce_buffer); an all-gather "
       "there waits but copies nothing."},
      row.json);
}

}  // namespace

void add_comm(CLI::App& bench, cli::Action& action) {
  auto row = std::make_shared<CommRow>();
  Flags flags(bench, "comm",
              "Time all-gather and reduce-scatter over sizes, beside a plain copy and Gloo",
              row->json,
              "  fsdp bench comm\n  fsdp bench comm --backend shm,mpi --ranks 4 --to 64M\n"
              "  fsdp bench comm --backend nccl --ranks 2 --json");
  flags.any("--backend", row->backends, "shm, mpi or nccl; several separated by commas")
      ->delimiter(',');
  flags.any("--ranks", row->on.ranks, "Ranks on this host");
  flags.any("--from", row->smallest, "Smallest full buffer: 1K, 64M, 1G");
  flags.any("--to", row->largest, "Largest full buffer");
  flags.flag("--no-peer", row->no_peer, "Without Gloo");
  flags.runs(action, row, run_comm, time_collectives);
}

}  // namespace fsdp::bench
