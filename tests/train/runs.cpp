#include "train/runs.h"
#include "paths.h"

#include <algorithm>
#include <fstream>
#include <sstream>

namespace fsdp::train {

Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

void write_text(const std::string& file) {
  std::ofstream out(file);
  const char* words[] = {"shard", "gather", "unit", "rank", "reduce", "step", "mesh", "the", "of"};
  uint32_t state = 12345;
  for (int i = 0; i < 6000; ++i) {
    state = state * 1664525 + 1013904223;
    out << words[(state >> 16) % 9] << ((state >> 8) % 7 == 0 ? ".\n" : " ");
  }
}

Words tiny_run(const launch::Folder& folder, const std::string& run, int steps) {
  std::string text = folder / "text";
  if (!std::filesystem::exists(text)) write_text(text);
  return {"--data.train",
          text,
          "--data.seq",
          "32",
          "--model.dim",
          "32",
          "--model.layers",
          "2",
          "--model.heads",
          "2",
          "--model.kv_heads",
          "1",
          "--train.batch",
          "12",
          "--optim.lr",
          "3e-3",
          "--model.ffn",
          "64",
          "--train.sample_tokens",
          "20",
          "--train.eval_batches",
          "2",
          "--optim.warmup_steps",
          std::to_string(std::min(5, steps - 1)),
          "--steps",
          std::to_string(steps),
          "--dir",
          folder / run};
}

Said run(Words command, Words environment) {
  for (const char* variable : {"RANK", "WORLD_SIZE", "FSDP_TIMEOUT"})
    environment.emplace_back(variable);
  environment.emplace_back("FSDP_BACKEND=shm");  // on the CPU, even if there is a GPU
  launch::Launched program(std::move(command), std::move(environment));
  Said said;
  said.code = program.wait();
  said.out = program.out();
  said.err = program.err();
  return said;
}

Said fsdp(Words arguments) {
  arguments.insert(arguments.begin(), paths::program("fsdp"));
  return run(std::move(arguments), {"OMP_NUM_THREADS=1"});
}

Words run_with_pids(const launch::Folder& folder, const Words& launcher) {
  return Words{paths::program("fsdp"), "run"} + launcher +
         Words{"--",
               "sh",
               "-c",
               "echo \"$FSDP_MEMORY_DIR\" > \"$0\"/memory-$RANK; echo $$ > \"$0\"/rank-$RANK; exec "
               "\"$@\"",
               folder.path(),
               paths::program("fsdp"),
               "train",
               "--log.every",
               "1"};
}

Said train(int ranks, Words arguments) {
  Words command = {"train", "--ranks", std::to_string(ranks)};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return fsdp(command);
}

std::vector<nlohmann::json> metrics(const launch::Folder& folder, const std::string& run) {
  std::istringstream lines(folder.read(run + "/metrics.jsonl"));
  std::vector<nlohmann::json> all;
  for (std::string line; std::getline(lines, line);) all.push_back(nlohmann::json::parse(line));
  return all;
}

std::vector<double> losses(const launch::Folder& folder, const std::string& run) {
  std::vector<double> all;
  for (const auto& line : metrics(folder, run)) all.push_back(line.at("loss").get<double>());
  return all;
}

}  // namespace fsdp::train
