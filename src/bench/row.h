// Row: one measurement of training steps: the model, the step, and the ranks that take it.
//
// A row has a name (rows.cpp), or flags describe it. Our ranks get it as JSON, the peer
// (bench/peers/peer_fsdp2.py) as flags.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "train/trainee.h"

namespace fsdp::bench {

struct Place {
  std::string device = "cpu";  // or cuda
  std::string backend = "";    // shm, mpi or nccl
  int ranks = 1;
  int threads = 1;  // per rank
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Place, device, backend, ranks, threads)

struct Row {
  std::string name = "";   // for --rows
  std::string title = "";  // for tables
  Place on = {};
  // bench train: eager, graph (CUDA graphs), plain (no FSDP), or tape (forwards, recorded or not).
  // bench offload, with eager steps: off, optimizer or everything.
  std::string mode = "eager";

  // --- the model ---
  std::string model = "llama";  // or mlp
  int64_t layers = 6, dim = 384, heads = 6, kv_heads = 0, ffn = 0, vocab = 4096, seq = 128;
  bool tied = false, qkv_bias = false;
  int64_t width = 2048;        // of each of an mlp's 8 linears
  std::string dtype = "fp32";  // of parameters in forward and backward; the optimizer has fp32
  // Where we and the peer draw the initial weights (the same ones): cpu, or device, which takes
  // seconds instead of minutes.
  std::string init = "cpu";

  // --- the step ---
  int64_t batch = 4;       // per rank and micro-batch
  int64_t accumulate = 1;  // micro-batches per step
  int steps = 10, warmup = 3;
  double clip = 1;                   // norm to clip gradients to; 0: don't clip
  std::string grad_dtype = "";       // of a bf16 row, until the update: bf16 or fp32; empty: fp32
  std::string activations = "none";  // as activations.mode of fsdp train
  int keep_last = 0;                 // blocks at the end that aren't recomputed

  // --- sharding ---
  std::string strategy = "FULL_SHARD";
  int copies = 0;       // HYBRID_SHARD: of the model; 0: one per host
  int reshard = 0;      // reshard_after_forward: a number of ranks; 0: as the strategy does
  int prefetch = 1;     // units gathered ahead
  double fraction = 1;  // share of the model to offload

  // --- what a rank also reports ---
  bool memory = false;  // what the engine and autograd keep, in one more step
  bool plan = false;    // the peak that a plan expects

  // --- what the parent knows of a named row ---
  std::vector<std::string> modes = {"eager", "graph", "plain"};
  double goal_ms = 0;         // largest step time; 0: no goal
  double goal_gb = 0;         // largest peak memory, MiB / 1000; 0: no goal
  double goal_times = 0;      // largest step time as a multiple of the peer's (on the CPU: of the
                              // time without FSDP); 0: no goal
  double published_rate = 0;  // tokens/s that others report, on another machine
  bool in_all = true;         // --rows all includes it
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Row, on, mode, model, layers, dim, heads, kv_heads,
                                                ffn, vocab, seq, tied, qkv_bias, width, dtype, init,
                                                batch, accumulate, steps, warmup, clip, grad_dtype,
                                                activations, keep_last, strategy, copies, reshard,
                                                prefetch, fraction, memory, plan)

std::vector<Row> cpu_rows();      // bench train --rows cpu
std::vector<Row> train_rows();    // with goals on a GPU, or published figures
std::vector<Row> offload_rows();  // two may share a name: with and without clipping
Row small_row();                  // what bench offload and bench strategies have without flags

// `names`: "all", or names separated by commas. Throws an Error for an unknown name.
std::vector<Row> rows_named(const std::string& names, const std::vector<Row>& rows);

inline bool offload_mode(const Row& row) {
  return row.mode == "off" || row.mode == "optimizer" || row.mode == "everything";
}

train::Config config_of(const Row& row);
std::string title_of(const Row& row);     // "Llama 13.8M"
std::string description(const Row& row);  // "Llama 13.8M: 6 layers, dim 384, …"
int64_t tokens_of(const Row& row);        // per rank and step; for an mlp, rows
double flops_of(const Row& row);          // likewise, of forward and backward
std::vector<std::string> peer_flags(const Row& row);
// The peer's flags for row.activations.
std::vector<std::string> peer_recomputes(const Row& row);

template <typename Item>
void append(std::vector<Item>& to, const std::vector<Item>& more) {
  to.insert(to.end(), more.begin(), more.end());
}
std::string counted(int64_t number, const std::string& noun);  // "1 rank", "2 ranks"

}  // namespace fsdp::bench
