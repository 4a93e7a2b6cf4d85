// Runs of `fsdp train` whose files are damaged, deleted or taken by another run.
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "paths.h"
#include "train/runs.h"

namespace fsdp::train {
namespace {

using launch::Folder;
using launch::has;
using launch::Launched;
namespace fs = std::filesystem;

const Words kAlone = {"OMP_NUM_THREADS=1", "FSDP_BACKEND=shm", "RANK", "WORLD_SIZE",
                      "FSDP_TIMEOUT"};
const Words kEveryStep = {"--checkpoint.every",     "1", "--checkpoint.when_busy", "wait",
                          "--checkpoint.keep_last", "0"};

// fsdp train, which goes on until it is ended.
Words endless(const Folder& folder, const Words& flags) {
  return Words{paths::program("fsdp"), "train",   "--ranks",  "1",           "--dir",
               folder / "run",         "--steps", "10000000", "--log.every", "1"} +
         flags;
}

Said resume(const Folder& folder, const std::string& steps, const Words& flags = {}) {
  return train(1, Words{"--dir", folder / "run", "--resume", "--steps", steps} + flags);
}

bool reaches(const Folder& folder, int step) {
  return launch::eventually([&] {
    return fs::exists(folder / "run/metrics.jsonl") &&
           folder.read("run/metrics.jsonl").find("\"step\":" + std::to_string(step) + ",") !=
               std::string::npos;
  });
}

// A run of two steps, and a checkpoint of each.
void make_run(const Folder& folder, const Words& flags = {}) {
  const Said said = train(1, tiny_run(folder, "run", 2) + kEveryStep + flags);
  ASSERT_EQ(said.code, 0) << said.err;
  ASSERT_TRUE(fs::exists(folder / "run/checkpoints/step-1/.metadata"));
}

void flip_a_byte(const fs::path& path) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  const auto at = static_cast<std::streamoff>(fs::file_size(path) / 2);
  file.seekg(at);
  const int byte = file.get();
  file.seekp(at);
  file.put(static_cast<char>(byte ^ 0x10));
}

int steps_written(const Folder& folder) {
  return static_cast<int>(metrics(folder, "run").size());
}

// --- two runs ---

TEST(Damage, ASecondRunInADirectoryIsRefused) {
  Folder folder;
  make_run(folder);
  Launched first(endless(folder, {"--resume"}), kAlone);
  ASSERT_TRUE(reaches(folder, 5)) << first.err();
  const Said second = resume(folder, "10000000");
  EXPECT_EQ(second.code, 1);
  EXPECT_TRUE(has(second.err, "belongs to process " + std::to_string(first.pid())));
  EXPECT_TRUE(has(second.err, "HINT: two runs would damage each other's files"));
  first.signal(SIGTERM);
  EXPECT_EQ(first.wait(), 0) << first.err();
  const auto lines = metrics(folder, "run");  // all of them, each once
  for (size_t i = 0; i < lines.size(); ++i) ASSERT_EQ(lines[i]["step"], i + 1);
}

TEST(Damage, AStoppedRunThatWasTakenOverWritesNothingMore) {
  Folder folder;
  make_run(folder);
  Launched first(endless(folder, Words{"--resume"} + kEveryStep), kAlone);
  ASSERT_TRUE(reaches(folder, 4)) << first.err();
  first.signal(SIGSTOP);
  const Said refused = resume(folder, "10000000");
  EXPECT_EQ(refused.code, 1);
  EXPECT_TRUE(has(refused.err, "which is stopped"));

  // A launcher that starts ranks again, with the same flags, doesn't take it back.
  const Said restarted = run({paths::program("fsdp"), "train", "--ranks", "1", "--dir",
                              folder / "run", "--resume", "--take-over", "--steps", "10000000"},
                             {"OMP_NUM_THREADS=1", "TORCHELASTIC_RESTART_COUNT=1"});
  EXPECT_EQ(restarted.code, 1);
  EXPECT_TRUE(has(restarted.err, "which is stopped"));

  const int steps = steps_written(folder) + 3;
  const Said second = resume(folder, std::to_string(steps), {"--take-over"});
  ASSERT_EQ(second.code, 0) << second.err;
  const std::string lines = folder.read("run/metrics.jsonl");
  first.signal(SIGCONT);
  EXPECT_EQ(first.wait(), 1);
  EXPECT_TRUE(has(first.err(), "was taken over by process"));
  EXPECT_EQ(folder.read("run/metrics.jsonl"), lines);
  const std::string last = "step-" + std::to_string(steps);
  EXPECT_EQ(fs::read_symlink(folder / "run/checkpoints/latest"), last);
  for (const auto& entry : fs::directory_iterator(folder / "run/checkpoints")) {
    EXPECT_EQ(entry.path().filename().string().find(".partial"), std::string::npos);
    if (entry.is_symlink()) continue;
    const Said verified = fsdp({"ckpt", "verify", entry.path().string()});
    EXPECT_EQ(verified.code, 0) << entry.path() << verified.out;
  }
  EXPECT_FALSE(has(folder.read("run/config.toml"), "take_over = true"));
}

TEST(Damage, AKilledRunIsResumedAtOnce) {
  Folder folder;
  make_run(folder);
  Launched first(endless(folder, {"--resume"}), kAlone);
  ASSERT_TRUE(reaches(folder, 5)) << first.err();
  first.signal(SIGKILL);
  first.wait();
  const Said second = resume(folder, std::to_string(steps_written(folder) + 2));
  EXPECT_EQ(second.code, 0) << second.err;
  EXPECT_TRUE(fs::exists(folder / "run/owner/3.json"));
}

// --- checkpoints ---

TEST(Damage, AFlippedByteMakesTheRunResumeFromTheCheckpointBefore) {
  Folder folder;
  make_run(folder);
  flip_a_byte(folder / "run/checkpoints/step-2/__0_0.distcp");
  const Said said = resume(folder, "3", kEveryStep);
  ASSERT_EQ(said.code, 0) << said.err;
  EXPECT_TRUE(has(said.err, "step-2 is damaged"));
  EXPECT_TRUE(has(said.err, "differ from what was saved"));
  EXPECT_TRUE(has(said.out, "resumed    after step 1"));
  EXPECT_TRUE(fs::exists(folder / "run/checkpoints/step-2.damaged"));
  EXPECT_EQ(steps_written(folder), 3);
}

TEST(Damage, WithoutItsManifestACheckpointIsNotUsed) {
  Folder folder;
  make_run(folder);
  const std::string step_2 = folder / "run/checkpoints/step-2";
  fs::remove(step_2 + "/.manifest.json");
  const Said said = resume(folder, "3");
  ASSERT_EQ(said.code, 0) << said.err;
  EXPECT_TRUE(has(said.err, "step-2 is damaged"));
  EXPECT_TRUE(has(said.err, ".manifest.json is missing"));
  EXPECT_TRUE(has(said.out, "resumed    after step 1"));

  Said verified = fsdp({"ckpt", "verify", step_2});
  EXPECT_EQ(verified.code, 0) << "step 2 was saved again" << verified.out;
  fs::remove(step_2 + "/.manifest.json");
  verified = fsdp({"ckpt", "verify", step_2});
  EXPECT_EQ(verified.code, 65);
  EXPECT_TRUE(has(verified.out, ".manifest.json: is missing"));
  verified = fsdp({"ckpt", "verify", step_2, "--restore-manifest"});
  EXPECT_EQ(verified.code, 0) << verified.out << verified.err;
  fs::remove(step_2 + "/.manifest.json");
  flip_a_byte(step_2 + "/__0_0.distcp");
  verified = fsdp({"ckpt", "verify", step_2, "--restore-manifest"});
  EXPECT_EQ(verified.code, 65);
  EXPECT_TRUE(has(verified.err, "aren't what was saved"));
  EXPECT_FALSE(fs::exists(step_2 + "/.manifest.json"));
}

// --- config.toml ---

TEST(Damage, AConfigThatWasCutIsAnErrorAndTheCheckpointHasACopy) {
  Folder folder;
  make_run(folder);
  const std::string file = folder / "run/config.toml", text = folder.read("run/config.toml");
  for (const size_t size : {size_t{0}, text.size() / 3, text.size() / 2, 9 * text.size() / 10}) {
    std::ofstream(file) << text.substr(0, size);
    const Said said = resume(folder, "3", {"--print-config"});
    EXPECT_EQ(said.code, 65) << size;
    EXPECT_TRUE(has(said.err, "config.toml is damaged")) << size;
    EXPECT_TRUE(has(said.err, "delete it, and the run goes on with the copy of it in")) << size;
  }
  fs::remove(file);
  const Said said = resume(folder, "3");
  ASSERT_EQ(said.code, 0) << said.err;
  EXPECT_TRUE(has(said.out, "is missing: the run goes on with the copy of it in step-2"));
  const auto lines = metrics(folder, "run");
  EXPECT_EQ(lines.size(), 3u);
  EXPECT_TRUE(has(folder.read("run/config.toml"), "lr = 0.003"));
}

TEST(Damage, AnEditedConfigIsTakenAndTheEditIsSaid) {
  Folder folder;
  make_run(folder);
  const std::string file = folder / "run/config.toml";
  std::string text = folder.read("run/config.toml");
  const std::string before = "\nclip = 1.0\n";
  ASSERT_NE(text.find(before), std::string::npos) << text;
  text.replace(text.find(before), before.size(), "\nclip = 0.5\n");
  std::ofstream(file) << text;
  Said said = resume(folder, "3");
  ASSERT_EQ(said.code, 0) << said.err;
  EXPECT_TRUE(has(said.out, "was edited; compared with step-2: train.clip is 0.5 instead of 1.0"));
  said = resume(folder, "4");  // it was written again, with its sum
  ASSERT_EQ(said.code, 0) << said.err;
  EXPECT_FALSE(has(said.out, "was edited"));
  EXPECT_TRUE(has(folder.read("run/config.toml"), "clip = 0.5"));
}

// --- what is deleted or cut while a run goes on ---

TEST(Damage, ADeletedDirectoryIsAnErrorAndIsNotMadeAgain) {
  Folder folder;
  make_run(folder);
  Launched run(endless(folder, {"--resume"}), kAlone);
  ASSERT_TRUE(reaches(folder, 5)) << run.err();
  run.signal(SIGSTOP);
  fs::remove_all(folder / "run");
  run.signal(SIGCONT);
  EXPECT_EQ(run.wait(), 1);
  EXPECT_TRUE(has(run.err(), "was deleted or moved"));
  EXPECT_FALSE(fs::exists(folder / "run"));
}

TEST(Damage, DataThatIsCutIsAnErrorThatNamesTheFile) {
  Folder folder;
  const std::string data = folder / "tokens.bin";
  std::ofstream(data, std::ios::binary) << std::string(200'000, '\1');
  Launched run(Words{paths::program("fsdp"),
                     "train",
                     "--ranks",
                     "1",
                     "--data.train",
                     data,
                     "--data.seq",
                     "32",
                     "--model.dim",
                     "32",
                     "--model.layers",
                     "1",
                     "--model.heads",
                     "2",
                     "--model.vocab",
                     "512",
                     "--train.batch",
                     "2",
                     "--steps",
                     "10000000",
                     "--dir",
                     folder / "run",
                     "--log.every",
                     "1"},
               kAlone);
  ASSERT_TRUE(reaches(folder, 3)) << run.err();
  fs::resize_file(data, 4096);
  EXPECT_EQ(run.wait(), 65);
  EXPECT_TRUE(has(run.err(), "tokens.bin was cut while it was in use: it had 200000 bytes"));
}

// --- limits ---

TEST(Damage, ALimitOnTheSizeOfFilesIsNamedAndDoesNotKill) {
  Folder folder;
  const Words command =
      Words{paths::program("fsdp"), "train", "--ranks", "1"} + tiny_run(folder, "run", 2);
  // Blocks of 512 bytes: too few for the ranks' shared memory, and for a checkpoint.
  for (const std::string blocks : {"40", "800"}) {
    const Words small = {"sh", "-c", "ulimit -f " + blocks + " && exec \"$@\"", "sh"};
    const Said said = run(small + command, {"OMP_NUM_THREADS=1"});
    EXPECT_EQ(said.code, 1) << "SIGXFSZ is " << 128 + SIGXFSZ;
    EXPECT_TRUE(has(said.err, "File too large"));
    EXPECT_TRUE(has(said.err, "ulimit -f unlimited"));
    fs::remove_all(folder / "run");
  }
}

}  // namespace
}  // namespace fsdp::train
