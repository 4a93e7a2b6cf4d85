#include "bench/rows.h"

#include <cmath>
#include <sstream>

#include "fsdp/error.h"

namespace fsdp::bench {
namespace {

// The public sizes of Qwen2.5, 524,288 tokens per step in sequences of 1024. `batch`: sequences per
// micro-batch, the most that fit in the peer's memory.
BenchRow qwen(const std::string& name, const std::string& title, Shape sizes, int64_t batch,
              double published) {
  sizes.vocab = 151936;
  sizes.kv_heads = 2;
  sizes.tied = sizes.qkv_bias = true;
  sizes.seq = 1024;
  sizes.batch = batch;
  sizes.accumulate = 524288 / (sizes.seq * batch);
  sizes.dtype = "bf16";
  return {.name = name,
          .title = title,
          .shape = sizes,
          .steps = 2,  // each has many micro-batches
          .warmup = 2,
          .modes = {"graph"},
          .published_rate = published,
          .published_by = "llmq, H100",
          .draw_on_cpu = false};
}

// The size at which activations matter: 8,192 tokens of a 3.6B model with a large vocabulary.
BenchRow llama_3b(const std::string& activations, double goal_ms, double goal_gb) {
  bool none = activations == "none";
  // From 953M parameters on, eager steps are as fast as graphs. Offload needs the host, so no
  // graph.
  const std::vector<std::string> modes = {activations == "offload" ? "eager" : "graph"};
  return {.name = none ? "3.6b" : "3.6b-" + activations,
          .title = "Llama 3.6B" + (none ? "" : ", " + activations),
          .shape = {.layers = 28,
                    .dim = 3072,
                    .heads = 24,
                    .kv_heads = 8,
                    .ffn = 8192,
                    .vocab = 128256,
                    .seq = 4096,
                    .batch = 2,
                    .dtype = "bf16"},
          .steps = 8,
          .warmup = 4,
          .modes = modes,
          .goal_ms = goal_ms,
          .goal_gb = goal_gb,
          .draw_on_cpu = false,
          .in_all = goal_ms > 0,
          .activations = activations};
}

Shape llama_953m() {
  return {.layers = 16,
          .dim = 2048,
          .heads = 16,
          .vocab = 32000,
          .seq = 2048,
          .batch = 4,
          .dtype = "bf16"};
}

Shape mlp_20480() {
  return {.model = "mlp", .width = 20480, .batch = 64, .dtype = "fp32"};
}

// Takes seconds on any machine, to check that a command works.
Shape tiny() {
  return {.layers = 2,
          .dim = 128,
          .heads = 4,
          .kv_heads = 2,
          .vocab = 256,
          .seq = 64,
          .batch = 2,
          .dtype = "bf16"};
}

}  // namespace

std::vector<BenchRow> train_rows() {
  std::vector<BenchRow> rows;
  rows.push_back({.name = "182m",
                  .title = "Llama 182M",
                  .shape = {.layers = 24,
                            .dim = 768,
                            .heads = 12,
                            .vocab = 8192,
                            .seq = 256,
                            .batch = 1,
                            .dtype = "bf16"},
                  .goal_ms = 6});
  rows.push_back({.name = "953m",
                  .title = "Llama 953M",
                  .shape = llama_953m(),
                  .goal_ms = 85,
                  .goal_gb = 18.5});
  rows.push_back({.name = "mlp",
                  .title = "MLP 8 x 20480 fp32",
                  .shape = mlp_20480(),
                  .steps = 10,
                  .goal_ms = 65,
                  .draw_on_cpu = false});
  rows.push_back({.name = "117m",
                  .title = "Llama 117M, 2 ranks",
                  .shape = {.layers = 4,
                            .dim = 1024,
                            .heads = 8,
                            .vocab = 32000,
                            .seq = 512,
                            .batch = 2,
                            .dtype = "bf16"},
                  .ranks = 2,
                  .steps = 10,
                  .modes = {"eager", "graph"},
                  .goal_times = 0.5});
  rows.push_back(qwen("qwen0.5b", "Qwen2.5 0.5B",
                      {.layers = 24, .dim = 896, .heads = 14, .ffn = 4864}, 32, 149e3));
  rows.push_back(qwen("qwen1.5b", "Qwen2.5 1.5B",
                      {.layers = 28, .dim = 1536, .heads = 12, .ffn = 8960}, 16, 59e3));
  rows.push_back(qwen("qwen3b", "Qwen2.5 3B",
                      {.layers = 36, .dim = 2048, .heads = 16, .ffn = 11008}, 8, 31e3));
  rows.push_back(llama_3b("none", 0, 0));
  rows.push_back(llama_3b("selective", 345, 0));
  rows.push_back(llama_3b("feed_forward", 0, 0));
  rows.push_back(llama_3b("full", 400, 50));
  rows.push_back(llama_3b("full", 400, 50));
  rows.back().name = "3.6b-keep8";
  rows.back().title += " but last 8";
  rows.back().keep_last = 8;
  rows.push_back(llama_3b("offload", 0, 0));
  Shape smallest = tiny();
  smallest.tied = smallest.qkv_bias = true;
  smallest.accumulate = 2;
  rows.push_back({.name = "tiny",
                  .title = "Llama, tiny",
                  .shape = smallest,
                  .steps = 3,
                  .warmup = 3,
                  .in_all = false});
  return rows;
}

std::vector<BenchRow> offload_rows() {
  auto llama = [](double clip, double goal_ms) {
    return BenchRow{.name = "953m",
                    .title = std::string("Llama 953M, ") + (clip > 0 ? "clip" : "no clip"),
                    .shape = llama_953m(),
                    .steps = 10,
                    .warmup = 3,
                    .goal_ms = goal_ms,
                    .clip = clip};
  };
  return {llama(1, 320),
          llama(0, 250),
          {.name = "mlp",
           .title = "MLP 8 x 20480 fp32, clip",
           .shape = mlp_20480(),
           .steps = 6,
           .warmup = 3,
           .goal_ms = 1300,
           .goal_gb = 6.5,
           .draw_on_cpu = false,
           .prefetch = 0},
          {.name = "tiny",
           .title = "Llama, tiny, clip",
           .shape = tiny(),
           .steps = 3,
           .warmup = 2,
           .in_all = false}};
}

std::vector<BenchRow> rows_named(const std::string& names, const std::vector<BenchRow>& rows) {
  std::vector<BenchRow> chosen;
  std::string known, last;
  for (const BenchRow& row : rows) {
    if (row.name != last) known += (known.empty() ? "" : ", ") + row.name;
    last = row.name;
    if (names == "all" && row.in_all) chosen.push_back(row);
  }
  if (names == "all") return chosen;
  std::istringstream parts(names);
  for (std::string name; std::getline(parts, name, ',');) {
    size_t before = chosen.size();
    for (const BenchRow& row : rows)
      if (row.name == name) chosen.push_back(row);
    if (chosen.size() == before)
      throw Error("there is no row \"" + name + "\".",
                  "--rows takes all, or some of these, separated by commas: " + known + ".");
  }
  return chosen;
}

double goal_ms(const BenchRow& row, double peer_ms) {
  if (row.goal_times > 0) return std::isnan(peer_ms) ? 0 : row.goal_times * peer_ms;
  return row.goal_ms;
}

}  // namespace fsdp::bench
