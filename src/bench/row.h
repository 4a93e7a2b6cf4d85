// Row: one measurement of training steps: the model, the step, and the ranks that take it.
//
// A row has a name (bench/rows.json), or flags describe it. Our ranks get it as JSON, the peer
// (bench/peers/peer_fsdp2.py) as flags.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/flags.h"
#include "train/config.h"

namespace fsdp::bench {

struct Flags;
using Strings = std::vector<std::string>;

struct Machine {
  std::string device = "cpu";  // or cuda
  std::string backend = "";    // shm, mpi or nccl
  int ranks = 1;
  int threads = 1;  // per rank
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Machine, device, backend, ranks, threads)

struct Row {
  Machine on = {};
  // bench train: eager, graph (CUDA graphs), plain (no FSDP), or tape (forwards, recorded or not).
  // bench offload, with eager steps: off, optimizer or everything.
  std::string mode = "eager";

  // --- the model ---
  std::string model = "llama";  // or mlp
  int64_t layers = 6, dim = 384, heads = 6, kv_heads = 0, ffn = 0, vocab = 4096, seq = 128;
  bool tied = false, qkv_bias = false;
  int64_t width = 2048;        // of each of an mlp's 8 linears
  std::string dtype = "fp32";  // of parameters in forward and backward; the optimizer has fp32
  std::string recipe = "tensorwise";  // of dtype fp8
  // Where we and the peer draw the initial weights (the same ones): cpu, or device, which takes
  // seconds instead of minutes.
  std::string init = "cpu";

  // --- the step ---
  int64_t batch = 4;       // per rank and micro-batch
  int64_t accumulate = 1;  // micro-batches per step
  int steps = 10, warmup = 3;
  std::string optim = "adamw";       // or muon
  double clip = 1;                   // norm to clip gradients to; 0: don't clip
  std::string grad_dtype = "";  // of a bf16 or fp8 row, until the update: bf16 or fp32; empty: fp32
  std::string activations = "none";  // as activations.mode of fsdp train
  int keep_last = 0;                 // blocks at the end that aren't recomputed

  // --- sharding ---
  std::string gather = "", reduce = "";  // as shard.gather and shard.reduce; empty: not in bytes
  bool share = true;                     // shm: parameters once per host
  std::string strategy = "FULL_SHARD";
  int copies = 0;       // HYBRID_SHARD: of the model; 0: one per host
  int reshard = 0;      // reshard_after_forward: a number of ranks; 0: as the strategy does
  int prefetch = 1;     // units gathered ahead
  double fraction = 1;  // share of the model to offload

  // --- what a rank also reports ---
  bool stages = false;  // the time of forward, backward, clip and update
  bool memory = false;  // what the engine and autograd keep, in one more step
  bool plan = false;    // the peak that a plan expects

  // --- for the parent only ---
  std::string name = "", title = "";  // for --rows; for tables
  Strings modes = {"eager", "graph", "plain"};
  double goal_ms = 0;         // largest step time; 0: no goal
  double goal_gb = 0;         // largest peak memory, MiB / 1000; 0: no goal
  double goal_times = 0;      // largest step time as a multiple of the peer's (on the CPU: of the
                              // time without FSDP); 0: no goal
  double published_rate = 0;  // tokens/s that others report, on another machine
  bool in_all = true;         // --rows all includes it

  bool offloads() const { return mode == "off" || mode == "optimizer" || mode == "everything"; }
  int64_t tokens() const { return batch * accumulate * (model == "mlp" ? 1 : seq); }  // or rows
  double flops() const;  // of forward and backward, per rank and step as tokens()
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Row, on, mode, model, layers, dim, heads, kv_heads,
                                                ffn, vocab, seq, tied, qkv_bias, width, dtype,
                                                recipe, init, batch, accumulate, steps, warmup,
                                                optim, clip, grad_dtype, gather, reduce, share,
                                                activations, keep_last, strategy, copies, reshard,
                                                prefetch, fraction, stages, memory, plan, name,
                                                title, modes, goal_ms, goal_gb, goal_times,
                                                published_rate, in_all)

// A list of bench/rows.json: cpu, train or offload. Two rows of offload may share a name: with and
// without clipping.
std::vector<Row> rows_of(const std::string& list);
// The rows of a list that --rows chooses: "all", or names separated by commas. Throws an Error for
// an unknown name.
std::vector<Row> rows_named(const std::string& names, const std::string& list);
std::string bench_file(const std::string& name);  // in bench of the source tree, or installed

// What bench offload and bench strategies have without flags.
inline const Row kSmallRow = {
    .layers = 4, .dim = 256, .heads = 4, .vocab = 2048, .seq = 64, .batch = 2};

// The flags of a benchmark of training steps.
struct Options {
  Row row = {};      // as flags describe it
  std::string rows;  // names; empty: the model is given by flags, too
  std::string only;  // ours, none (no FSDP) or peer; empty: all
  Strings modes;     // empty: the row's own
  int rounds = 1;
  bool json = false, peer = false;
  std::string page;                   // file to write; empty: bench/results/GPU.md
  std::string keep;                   // file of raw lines
  int limit = 400;                    // seconds per measurement of a named row
  const CLI::App* command = nullptr;  // which flags were given

  bool wants(const std::string& kind) const { return only.empty() || only == kind; }
  bool beside_peer() const { return peer || only == "peer"; }  // of named rows
};

// For benchmarks of training steps: the place, the steps and the model.
void add_row_flags(Flags& flags, Options& options);
// For named rows: other settings that rows have, --peer, and the page. The flags that follow are
// for named rows, too.
void add_named_flags(Flags& flags, Options& options, const char* peer);

constexpr const char *kNamedRows = "Named rows", *kModel = "The model";  // groups of flags
// A flag of that group that was given; null if none was.
const CLI::Option* given_in(const Options& options, const std::string& group);
bool given(const Options& options, const std::string& flag);  // not for flags of the model
void require_rows(const Options& options);  // throws if a flag of named rows has no --rows

// `row` with the flags that were given instead of its own settings, except those of the model, and
// at the place of the flags. A named row has its own number of ranks unless --ranks is given.
Row with_flags(const Row& row, const Options& options);

train::Config config_of(const Row& row);
nlohmann::json for_rank(const Row& row);
std::string peer_flags(const Row& row);  // separated by spaces

std::string title_of(const Row& row);     // "Llama 13.8M"
std::string description(const Row& row);  // "Llama 13.8M: 6 layers, dim 384, …"
// "Llama 13.8M: …; 2 ranks x 1 threads, shm", and how memory and time were measured.
Strings notes_of(const Row& row, const std::string& memory);

}  // namespace fsdp::bench
