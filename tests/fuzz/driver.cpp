// The loop around a fuzz target, for compilers without libFuzzer: it keeps inputs that take new
// edges and makes new inputs from those. The entry point is libFuzzer's, so the targets work with
// either.
//
//   NAME_fuzz [--seconds N] [--runs N] [--seed S] [--limit N] [--longest N] [--dict FILE]
//             [--out FOLDER] [SEED FILES AND FOLDERS]
//
// A target passes an input by returning. A failure is an exception, a signal, a sanitizer's report,
// more than --limit seconds of CPU time or too much memory (see __asan_default_options): the input
// is written to a file, and the exit status is 1. --runs 0 runs only the seeds.
#include <fcntl.h>
#include <sanitizer/lsan_interface.h>
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>

#include "fuzz/coverage.h"
#include "fuzz/mutate.h"
#include "fuzz/scratch.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// Leaks are checked only with ASAN_OPTIONS=detect_leaks=1: LibTorch keeps what it allocates when it
// is loaded.
extern "C" const char* __asan_default_options() {
  return "abort_on_error=1:handle_abort=0:max_allocation_size_mb=512:hard_rss_limit_mb=1536:"
         "quarantine_size_mb=32:malloc_context_size=8:detect_stack_use_after_return=0:"
         "detect_leaks=0";
}
extern "C" const char* __ubsan_default_options() {
  return "abort_on_error=1:print_stacktrace=1";
}

namespace fsdp::fuzz {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

struct Options {
  double seconds = 0;  // 0: no limit
  int64_t runs = -1;   // after the seeds; -1: no limit
  uint64_t seed = 1;
  int limit = 5;          // seconds of CPU time per input
  size_t longest = 8192;  // bytes of a generated input
  std::string dictionary, out = ".";
  std::vector<fs::path> seeds;
};

// What a signal handler needs; it may not allocate memory.
const uint8_t* current = nullptr;
size_t current_size = 0;
volatile sig_atomic_t ticks = 0;  // seconds of CPU time on this input
int limit = 0;
char program[512], out_folder[512];

void say(const char* text) {
  if (::write(STDERR_FILENO, text, std::strlen(text)) < 0) return;
}

// Writes the input that failed, says how to run it again, and exits. Signal handlers call it too.
[[noreturn]] void fail(const char* why) {
  if (!current) {  // a leak, found at the end
    say("\nFAILED: the report above belongs to no single input\n");
    ::_exit(1);
  }
  uint64_t sum = 0xcbf29ce484222325u;
  for (size_t i = 0; i < current_size; ++i) sum = (sum ^ current[i]) * 0x100000001b3u;
  const char* name = std::strrchr(program, '/');
  name = name ? name + 1 : program;
  char path[1200];
  std::snprintf(path, sizeof path, "%s/%s-%016llx", out_folder, name,
                static_cast<unsigned long long>(sum));
  const int file = ::open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  bool written = file >= 0;
  for (size_t done = 0; written && done < current_size;) {
    const ssize_t part = ::write(file, current + done, current_size - done);
    written = part > 0;
    done += written ? static_cast<size_t>(part) : 0;
  }
  say("\nFAILED: ");
  say(why);
  say(written ? "\n  the input is in " : "\n  couldn't write the input to ");
  say(path);
  say("\n  HINT: run only that input again:\n    ");
  say(program);
  say(" --runs 0 ");
  say(path);
  say("\n");
  ::_exit(1);
}

void on_abort(int) {
  fail("a sanitizer, an assertion or std::terminate ended it; see the report above");
}

void on_tick(int) {
  ticks = ticks + 1;
  if (current && ticks > limit) fail("it takes too long");
}

void watch() {
  struct sigaction action = {};
  action.sa_handler = on_abort;
  ::sigaction(SIGABRT, &action, nullptr);
  action.sa_handler = on_tick;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGPROF, &action, nullptr);
  const itimerval every_second{{1, 0}, {1, 0}};
  ::setitimer(ITIMER_PROF, &every_second, nullptr);  // of CPU time: a busy machine isn't a hang
}

// Runs a copy of exactly its size, so that a read past the end is seen. Returns the number of new
// edges.
size_t run(const std::string& input) {
  const std::unique_ptr<uint8_t[]> bytes(new uint8_t[input.size()]);
  std::copy(input.begin(), input.end(), bytes.get());
  forget_input();
  current_size = input.size();
  ticks = 0;
  current = bytes.get();
  try {
    LLVMFuzzerTestOneInput(bytes.get(), input.size());
  } catch (const std::exception& problem) {
    fail((std::string("an exception left the target: ") + problem.what()).c_str());
  } catch (...) {
    fail("an exception left the target");
  }
  current = nullptr;
  return learn_edges();
}

// --- options and files ---

[[noreturn]] void refuse(const std::string& what) {
  std::fprintf(stderr,
               "%s\n  HINT: options are --seconds N, --runs N, --seed S, --limit N, "
               "--longest N, --dict FILE, --out FOLDER, and files or folders of seeds.\n",
               what.c_str());
  std::exit(2);
}

std::string contents(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) refuse("can't read " + path.string() + ".");
  return std::move(text).str();
}

double number(const std::string& option, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || value < 0) refuse(option + " needs a number.");
  return value;
}

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string name = arguments[i];
    if (!name.starts_with("--")) {
      options.seeds.emplace_back(name);
      continue;
    }
    if (++i == count) refuse(name + " needs a value.");
    const std::string value = arguments[i];
    if (name == "--seconds")
      options.seconds = number(name, value);
    else if (name == "--runs")
      options.runs = static_cast<int64_t>(number(name, value));
    else if (name == "--seed")
      options.seed = static_cast<uint64_t>(number(name, value));
    else if (name == "--limit")
      options.limit = static_cast<int>(number(name, value));
    else if (name == "--longest")
      options.longest = static_cast<size_t>(number(name, value));
    else if (name == "--dict")
      options.dictionary = value;
    else if (name == "--out")
      options.out = value;
    else
      refuse("there is no option " + name + ".");
  }
  return options;
}

// In order of name, so that --seed determines the run.
std::vector<std::string> read_seeds(const std::vector<fs::path>& paths) {
  std::vector<fs::path> files;
  for (const auto& path : paths) {
    if (!fs::is_directory(path)) {
      files.push_back(path);
      continue;
    }
    const size_t before = files.size();
    for (const auto& entry : fs::recursive_directory_iterator(path))
      if (entry.is_regular_file()) files.push_back(entry.path());
    std::sort(files.begin() + static_cast<std::ptrdiff_t>(before), files.end());
  }
  std::vector<std::string> seeds;
  for (const auto& file : files) seeds.push_back(contents(file));
  return seeds;
}

// Like libFuzzer's dictionaries: one quoted word per line, with \xNN, \\ and \" in it; # comments.
std::vector<std::string> read_dictionary(const std::string& path) {
  std::vector<std::string> words;
  if (path.empty()) return words;
  std::istringstream lines(contents(path));
  for (std::string line; std::getline(lines, line);) {
    const size_t begin = line.find('"'), end = line.rfind('"');
    if (line.starts_with('#') || begin == std::string::npos || end == begin) continue;
    std::string word;
    for (size_t at = begin + 1; at < end; ++at) {
      if (line[at] != '\\') {
        word += line[at];
      } else if (line[at + 1] == 'x' && at + 3 < end) {
        word += static_cast<char>(std::stoi(line.substr(at + 2, 2), nullptr, 16));
        at += 3;
      } else {
        word += line[++at];
      }
    }
    words.push_back(std::move(word));
  }
  return words;
}

// --- the loop ---

struct Progress {
  Clock::time_point begin = Clock::now(), shown = begin;
  int64_t runs = 0;

  static double seconds(Clock::duration time) {
    return std::chrono::duration<double>(time).count();
  }
  double elapsed() const { return seconds(Clock::now() - begin); }
  void print(size_t kept) const {
    const double passed = elapsed();
    std::printf("%lld runs, %.0f runs/s, %zu edges, %zu kept, %.0f s\n",
                static_cast<long long>(runs), static_cast<double>(runs) / std::max(passed, 1e-3),
                known_edges(), kept, passed);
    std::fflush(stdout);
  }
  void print_sometimes(size_t kept) {
    if (seconds(Clock::now() - shown) < 5) return;
    shown = Clock::now();
    print(kept);
  }
};

int main(int count, char** arguments) {
  const Options options = parse(count, arguments);
  std::snprintf(program, sizeof program, "%s", arguments[0]);
  std::snprintf(out_folder, sizeof out_folder, "%s", options.out.c_str());
  limit = options.limit;
  Material material{{}, read_dictionary(options.dictionary), options.longest};
  const auto seeds = read_seeds(options.seeds);
  std::printf("--seed %llu, %zu seeds, %zu words\n", static_cast<unsigned long long>(options.seed),
              seeds.size(), material.words.size());
  std::fflush(stdout);
  watch();

  Progress progress;
  for (const auto& seed : seeds) {
    run(seed);
    ++progress.runs;
    if (seed.size() <= options.longest) material.inputs.push_back(seed);
  }
  if (material.inputs.empty()) material.inputs.emplace_back();
  const int64_t first = progress.runs;
  Random random(options.seed);
  while ((options.runs < 0 || progress.runs - first < options.runs) &&
         (options.seconds == 0 || progress.elapsed() < options.seconds)) {
    // The latest finds are tried more often.
    const size_t all = material.inputs.size(), late = std::min(all, size_t{32});
    const size_t chosen = random.below(2) == 0 ? random.below(all) : all - 1 - random.below(late);
    std::string input = mutate(material.inputs[chosen], material, random);
    ++progress.runs;
    if (run(input) > 0) material.inputs.push_back(std::move(input));
    if (progress.runs % 64 == 0) progress.print_sometimes(material.inputs.size());
  }
  progress.print(material.inputs.size());
  return 0;
}

}  // namespace
}  // namespace fsdp::fuzz

int main(int count, char** arguments) {
  const int status = fsdp::fuzz::main(count, arguments);
  fsdp::fuzz::remove_scratch_folder();
  // What libraries do at process exit isn't under test; only leaks are checked.
  __lsan_do_leak_check();
  std::fflush(nullptr);
  ::_exit(status);
}
