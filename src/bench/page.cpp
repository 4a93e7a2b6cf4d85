#include "bench/page.h"

#include <cctype>
#include <chrono>
#include <ctime>
#include <fstream>
#include <sstream>

#include "cli/probes.h"
#include "fsdp/version.h"

namespace fsdp::bench {
namespace {

// The first value printed under this name; empty if there is none.
std::string said(const std::vector<RowResult>& results, const std::string& who, const char* field) {
  for (const RowResult& result : results)
    for (const Measured& one : result.all)
      for (const Json& line : one.rounds)
        if ((who.empty() || one.who == who) && line.contains(field))
          return line[field].is_string() ? line[field].get<std::string>() : line[field].dump();
  return "";
}

std::string today() {
  std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm parts{};
  char text[32] = "";
  if (gmtime_r(&now, &parts)) std::strftime(text, sizeof text, "%Y-%m-%d", &parts);
  return text;
}

// The command as typed: "./fsdp bench train …".
std::string own_command() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string all, word;
  bool first = true;
  while (std::getline(file, word, '\0')) {
    if (word.starts_with('/')) word.erase(0, word.rfind('/') + 1);  // without paths of this machine
    all += first ? "./fsdp bench" : " " + word;
    first = false;
  }
  return all;
}

// Without the folder: a page shows no paths of this machine.
std::string without_place(std::string text) {
  size_t place = text.find(" in /");
  if (place != std::string::npos) text.erase(place);
  return text;
}

std::string software(const std::vector<RowResult>& results) {
  std::string text = "fsdp.cpp " FSDP_VERSION ", " + cli::probe_compiler().found + "; LibTorch " +
                     without_place(cli::probe_libtorch().found);
  std::string peer = said(results, "peer", "peer");
  if (!peer.empty()) text += "; " + peer;
  for (const char* field : {"cuda", "cudnn", "nccl"})
    if (std::string found = said(results, "peer", field); !found.empty())
      text += std::string(", ") + field + " " + found;
  return text;
}

}  // namespace

std::string page_path(const std::vector<RowResult>& results, const std::string& suffix) {
  std::string name = said(results, "", "gpu");
  if (name.empty()) name = "cpu";
  if (name.starts_with("NVIDIA ")) name.erase(0, 7);
  for (char& letter : name)
    letter = std::isalnum(static_cast<unsigned char>(letter))
                 ? static_cast<char>(std::tolower(static_cast<unsigned char>(letter)))
                 : '-';
  return "bench/results/" + name + suffix + ".md";
}

std::string page_of(const Page& page, const std::vector<RowResult>& results) {
  std::string gpu = said(results, "", "gpu");
  std::ostringstream out;
  out << "# " << page.heading << " on " << (gpu.empty() ? "the CPU" : "an " + gpu)
      << ", beside FSDP2\n\n"
      << "| | |\n|---|---|\n"
      << "| machine | " << (page.device == "cuda" ? cli::probe_gpus().found + "; " : "")
      << cli::probe_cores().found << " |\n| software | " << software(results) << " |\n| date | "
      << today() << " |\n| command | `" << own_command() << "` |\n\n";
  if (!page.summary.empty()) out << page.summary << "\n";
  out << "```\n" << page.tables << "```\n\n";
  for (const std::string& note : page.notes) out << "- " << note << "\n";
  out << "\nThe command of each row and its raw lines (it ran --ranks processes):\n\n```\n";
  for (const RowResult& result : results)
    for (const Measured& one : result.all) {
      out << "== " << result.row.title << ", " << one.title << ", " << result.row.ranks
          << (result.row.ranks == 1 ? " rank: " : " ranks: ") << one.command << "\n";
      for (const Json& line : one.rounds) out << line.dump() << "\n";
      if (!one.failure.empty()) out << "failed: " << one.failure << "\n";
    }
  out << "```\n";
  return out.str();
}

}  // namespace fsdp::bench
