// fsdp ckpt verify: reads every byte of a checkpoint and reports damage.
#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>

#include "base/exit_code.h"
#include "base/table.h"
#include "base/terminal.h"
#include "checkpoint/intact.h"
#include "checkpoint/verify.h"
#include "cli/ckpt.h"
#include "cli/ckpt_show.h"

namespace fsdp::cli {
namespace {

struct VerifyFlags {
  std::string dir;
  int threads = 0;
  bool json = false, restore = false;
};

constexpr const char* kVerifyNotes =
    "Examples:\n"
    "  fsdp ckpt verify runs/mine\n"
    "  fsdp ckpt verify runs/mine/checkpoints/step-100 --json | jq .problems\n"
    "  fsdp ckpt verify runs/mine/checkpoints/step-100 --restore-manifest\n"
    "\n"
    "Every byte is read once and checked against the checksums of the manifest or, if Python "
    "wrote\n"
    "the checkpoint, against the CRC-32 of each record. Hugging Face files have no checksums: "
    "only\n"
    "their headers and sizes are checked.\n"
    "A manifest that was lost can be made again while all other bytes are as they were saved.\n"
    "Exit code: 0 intact, 65 damaged.";

// What the bytes were checked against.
std::string method(checkpoint::ChecksumKind sums) {
  if (sums == checkpoint::ChecksumKind::kBlocks)
    return "every block matches its checksum in the manifest";
  if (sums == checkpoint::ChecksumKind::kRecords)
    return "every record matches its CRC-32 (there is no manifest)";
  return "headers and file sizes are right (these files have no checksums)";
}

const char* key(checkpoint::ChecksumKind sums) {
  if (sums == checkpoint::ChecksumKind::kBlocks) return "manifest";
  return sums == checkpoint::ChecksumKind::kRecords ? "crc32" : "none";
}

void print_verify_json(const std::string& dir, const checkpoint::Verified& found) {
  nlohmann::ordered_json all = {{"checkpoint", dir},       {"ok", found.problems.empty()},
                                {"sums", key(found.sums)}, {"files", found.files},
                                {"bytes", found.bytes},    {"tensors", found.tensors}};
  all["problems"] = nlohmann::ordered_json::array();
  for (const auto& problem : found.problems) {
    nlohmann::ordered_json line = {{"file", problem.file}, {"what", problem.what}};
    line["begin"] = line["end"] = nullptr;
    if (problem.begin >= 0) line["begin"] = problem.begin, line["end"] = problem.end;
    line["names"] = problem.names;
    all["problems"].push_back(std::move(line));
  }
  std::cout << all.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace) << "\n";
}

void print(const checkpoint::Problem& problem) {
  std::cout << "  " << (problem.file.empty() ? "" : visible(problem.file) + ": ");
  if (problem.begin >= 0) std::cout << byte_range(problem.begin, problem.end) << ": ";
  std::cout << visible(problem.what) << "\n";
  std::vector<Foldable> names;
  for (const auto& name : problem.names) names.push_back({name, ""});
  const auto folded = fold(names);
  constexpr size_t kShown = 8;
  for (size_t i = 0; i < std::min(folded.size(), kShown); ++i)
    std::cout << "      " << visible(folded[i].name) << "\n";
  if (folded.size() > kShown) std::cout << "      and " << folded.size() - kShown << " more\n";
}

int run_verify(const VerifyFlags& flags) {
  const auto dir = newest_at(flags.dir);
  if (flags.restore) checkpoint::restore_manifest(dir);
  checkpoint::Verified found;
  {
    ByteProgress progress("verifying");
    found = checkpoint::verify(
        dir, {.threads = flags.threads,
              .progress = [&](int64_t done, int64_t total) { progress.at(done, total); }});
  }
  const bool good = found.problems.empty();
  if (flags.json) {
    print_verify_json(dir.string(), found);
    return good ? kExitDone : kExitDamaged;
  }
  std::cout << visible(dir.string()) << ": " << with_separators(found.tensors) << " tensors in "
            << with_separators(found.files) << (found.files == 1 ? " file, " : " files, ")
            << human_bytes(static_cast<double>(found.bytes)) << "\n";
  if (good) {
    std::cout << paint(STDOUT, "32", "good") << ": " << method(found.sums) << "\n";
    return kExitDone;
  }
  for (const auto& problem : found.problems) print(problem);
  const size_t count = found.problems.size();
  std::cout << paint(STDOUT, "31", "damaged") << ": " << count
            << (count == 1 ? " problem" : " problems")
            << "\n  HINT: copy the files again if this is a copy, or load another checkpoint.\n";
  return kExitDamaged;
}

}  // namespace

void add_ckpt_verify(CLI::App& ckpt, Action& action) {
  auto flags = std::make_shared<VerifyFlags>();
  CLI::App* command =
      ckpt.add_subcommand("verify", "Read every byte of a checkpoint and report damage");
  command->footer(kVerifyNotes);
  command
      ->add_option("dir", flags->dir,
                   "A run's directory, one of its checkpoints, or a Hugging Face directory")
      ->type_name("DIR")
      ->required();
  command->add_option("--threads", flags->threads, "Reader threads; 0: chosen automatically")
      ->check(CLI::Range(0, 256))
      ->type_name("N")
      ->capture_default_str();
  command->add_flag("--json", flags->json, "One JSON object");
  command->add_flag("--restore-manifest", flags->restore,
                    "First make a lost .manifest.json again, if the files are as saved");
  command->callback([flags, &action] { action = [flags] { return run_verify(*flags); }; });
}

}  // namespace fsdp::cli
