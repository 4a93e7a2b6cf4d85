// The named rows: models with a goal on the CPU or a GPU, or with a published figure.
#include <sstream>

#include "base/format.h"
#include "bench/row.h"
#include "fsdp/error.h"

namespace fsdp::bench {
namespace {

struct Sizes {
  int64_t layers, dim, heads, kv_heads, ffn, vocab, seq, batch;
};

Row llama(const std::string& name, const std::string& title, const Sizes& sizes, int steps,
          int warmup) {
  return {.name = name,
          .title = title,
          .layers = sizes.layers,
          .dim = sizes.dim,
          .heads = sizes.heads,
          .kv_heads = sizes.kv_heads,
          .ffn = sizes.ffn,
          .vocab = sizes.vocab,
          .seq = sizes.seq,
          .dtype = "bf16",
          .batch = sizes.batch,
          .steps = steps,
          .warmup = warmup};
}

Row mlp(const std::string& title, int steps, int warmup, double goal_ms) {
  return {.name = "mlp",
          .title = title,
          .model = "mlp",
          .width = 20480,
          .init = "device",
          .batch = 64,
          .steps = steps,
          .warmup = warmup,
          .goal_ms = goal_ms};
}

constexpr Sizes k953M = {16, 2048, 16, 0, 0, 32000, 2048, 4};
constexpr Sizes kTiny = {2, 128, 4, 2, 0, 256, 64, 2};

// 524,288 tokens per step, in as many sequences per micro-batch as fit in the peer's memory.
// `published`: by llmq, for one H100.
Row qwen(const std::string& name, const Sizes& sizes, double published) {
  Row row = llama("qwen" + name + "b", "Qwen2.5 " + name + "B", sizes, 2, 2);
  row.tied = row.qkv_bias = true;
  row.init = "device";
  row.accumulate = 524288 / (row.seq * row.batch);
  row.modes = {"graph"};
  row.published_rate = published;
  return row;
}

// The size at which activations matter: 8,192 tokens of a 3.6B model with a large vocabulary.
Row llama_3b(const std::string& activations, double goal_ms, double goal_gb) {
  const bool none = activations == "none";
  Row row = llama(none ? "3.6b" : "3.6b-" + activations,
                  none ? "Llama 3.6B" : "Llama 3.6B, " + activations,
                  {28, 3072, 24, 8, 8192, 128256, 4096, 2}, 8, 4);
  row.init = "device";
  row.activations = activations;
  // From 953M parameters on, eager steps are as fast as graphs. Offload needs the host, so no
  // graph.
  row.modes = {activations == "offload" ? "eager" : "graph"};
  row.goal_ms = goal_ms;
  row.goal_gb = goal_gb;
  row.in_all = goal_ms > 0;
  return row;
}

}  // namespace

std::vector<Row> cpu_rows() {
  return {{.goal_times = 1}, {.model = "mlp", .batch = 8, .goal_times = 0.9}};
}

std::vector<Row> train_rows() {
  std::vector<Row> rows = {
      llama("182m", "Llama 182M", {24, 768, 12, 0, 0, 8192, 256, 1}, 20, 5),
      llama("953m", "Llama 953M", k953M, 20, 5),
      mlp("MLP 8 x 20480 fp32", 10, 5, 65),
      llama("117m", "Llama 117M, 2 ranks", {4, 1024, 8, 0, 0, 32000, 512, 2}, 10, 5),
      qwen("0.5", {24, 896, 14, 2, 4864, 151936, 1024, 32}, 149e3),
      qwen("1.5", {28, 1536, 12, 2, 8960, 151936, 1024, 16}, 59e3),
      qwen("3", {36, 2048, 16, 2, 11008, 151936, 1024, 8}, 31e3),
      llama_3b("none", 0, 0),
      llama_3b("selective", 345, 0),
      llama_3b("feed_forward", 0, 0),
      llama_3b("full", 400, 50),
      llama_3b("full", 400, 50),
      llama_3b("offload", 0, 0),
      llama("tiny", "Llama, tiny", kTiny, 3, 3)};
  rows[0].goal_ms = 6;
  rows[1].goal_ms = 85;
  rows[1].goal_gb = 18.5;
  rows[3].on.ranks = 2;
  rows[3].modes = {"eager", "graph"};
  rows[3].goal_times = 0.5;
  Row& keeps = rows[11];
  keeps.name = "3.6b-keep8";
  keeps.title += " but last 8";
  keeps.keep_last = 8;
  Row& tiny = rows.back();  // takes seconds on any machine, to check that a command works
  tiny.tied = tiny.qkv_bias = true;
  tiny.accumulate = 2;
  tiny.in_all = false;
  return rows;
}

std::vector<Row> offload_rows() {
  std::vector<Row> rows = {llama("953m", "Llama 953M, clip", k953M, 10, 3),
                           llama("953m", "Llama 953M, no clip", k953M, 10, 3),
                           mlp("MLP 8 x 20480 fp32, clip", 6, 3, 1300),
                           llama("tiny", "Llama, tiny, clip", kTiny, 3, 2)};
  rows[0].goal_ms = 320;
  rows[1].goal_ms = 250;
  rows[1].clip = 0;
  rows[2].prefetch = 0;
  rows[2].goal_gb = 6.5;
  rows[3].in_all = false;
  return rows;
}

Row small_row() {
  return {.layers = 4, .dim = 256, .heads = 4, .vocab = 2048, .seq = 64, .batch = 2};
}

std::vector<Row> rows_named(const std::string& names, const std::vector<Row>& rows) {
  std::vector<Row> chosen;
  std::string known, last;
  for (const Row& row : rows) {
    if (row.name != last) known += (known.empty() ? "" : ", ") + row.name;
    last = row.name;
    if (names == "all" && row.in_all) chosen.push_back(row);
  }
  if (names == "all") return chosen;
  std::istringstream parts(names);
  for (std::string name; std::getline(parts, name, ',');) {
    const size_t before = chosen.size();
    for (const Row& row : rows)
      if (row.name == name) chosen.push_back(row);
    if (chosen.size() == before)
      throw Error(formatted("there is no row \"{}\".", name),
                  formatted("--rows takes all, or some of these, separated by commas: {}.", known));
  }
  return chosen;
}

}  // namespace fsdp::bench
