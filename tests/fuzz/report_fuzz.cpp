// A run's directory as `fsdp report` reads it: metrics.jsonl, events.jsonl, config.toml and
// profile.json. The page is made of whatever can be read; no name in it may become markup.
#include <cstdlib>

#include "fsdp/error.h"
#include "fuzz/scratch.h"
#include "report/profile_section.h"
#include "report/run_page.h"

namespace report = fsdp::report;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto folder = fsdp::fuzz::scratch_folder() / "run";
  fsdp::fuzz::write_files(folder, {reinterpret_cast<const char*>(data), size},
                          {"metrics.jsonl", "events.jsonl", "config.toml", "profile.json"});
  try {
    const report::RunFiles run = report::read_run(folder);
    for (const auto& [key, values] : run.values)
      if (values.size() != run.steps.size()) std::abort();
    for (size_t i = 1; i < run.steps.size(); ++i)
      if (run.steps[i] <= run.steps[i - 1]) std::abort();
    const std::string html = report::run_page({{.files = run}, {.files = run}}).html();
    if (html.find("<fuzz") != std::string::npos) std::abort();  // a word of the dictionary
    if (!run.profile.is_null()) report::profile_page("fuzzed", run.profile).html();
  } catch (const fsdp::Error&) {
  }
  return 0;
}
