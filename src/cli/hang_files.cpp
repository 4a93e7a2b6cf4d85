#include "cli/hang_files.h"

#include <c10/core/ScalarType.h>
#include <signal.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <sstream>
#include <thread>

#include "base/format.h"
#include "base/process.h"
#include "base/rank_status.h"
#include "base/regular_file.h"
#include "checkpoint/pickle.h"
#include "fsdp/error.h"
#include "report/run_files.h"

namespace fsdp::cli {
namespace {

namespace fs = std::filesystem;
namespace pickle = checkpoint::pickle;
using pickle::Pickled;

constexpr int64_t kLargestFile = 64 << 20;  // 2,000 calls take less than 1 MB
constexpr int kMostNamedRanks = 1 << 20;
constexpr auto kAnswer = std::chrono::seconds(5);
constexpr double kOlder = 10;  // seconds
constexpr const char* kFilePrefix = "rank-";

// A file as it is read: every access says what is missing.
class Reader {
 public:
  explicit Reader(const fs::path& file) : where_(file.string()) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(formatted("{} isn't a file of the flight recorder: {}.", where_, what),
                "it is damaged, or another program wrote it.");
  }

  const Pickled& get(const Pickled& dict, const char* key, pickle::PickledKind kind) const {
    const Pickled* value = dict.find(key);
    if (!value) fail(formatted("it has no \"{}\"", key));
    if (!value->is(kind)) fail(formatted("\"{}\" is a {}", key, pickle::name(value->kind)));
    return *value;
  }
  int64_t integer(const Pickled& dict, const char* key, int64_t least, int64_t most) const {
    const int64_t value = get(dict, key, pickle::kInteger).integer;
    if (value < least || value > most) fail(formatted("\"{}\" is {}", key, value));
    return value;
  }
  const std::string& text(const Pickled& dict, const char* key) const {
    return get(dict, key, pickle::kString).text;
  }
  bool boolean(const Pickled& dict, const char* key) const {
    return get(dict, key, pickle::kBoolean).integer != 0;
  }
  int64_t time(const Pickled& dict, const char* key) const {  // None: 0
    const Pickled* value = dict.find(key);
    return value && value->is(pickle::kInteger) ? value->integer : 0;
  }

 private:
  const std::string where_;
};

std::vector<int> ranks_of(const Reader& reader, const std::string& list) {
  std::vector<int> ranks;
  std::istringstream in(list);
  char mark = 0;
  if (!(in >> mark) || mark != '[') reader.fail("its list of ranks is \"" + list + "\"");
  for (int rank = 0; in >> rank;) {
    if (rank < 0 || rank >= kMostNamedRanks) reader.fail(formatted("it names rank {}", rank));
    ranks.push_back(rank);
    in >> mark;
  }
  if (mark != ']') reader.fail("its list of ranks is \"" + list + "\"");
  return ranks;
}

// The value of an enum by its name.
template <typename Value, typename Name>
Value by_name(const Reader& reader, const std::string& text, int count, Name name) {
  for (int i = 0; i < count; ++i)
    if (text == name(static_cast<Value>(i))) return static_cast<Value>(i);
  reader.fail("it has the name \"" + text + "\"");
}

comm::Description description_of(const Reader& reader, const Pickled& call) {
  comm::Description what;
  what.operation = by_name<comm::Operation>(reader, reader.text(call, "operation"),
                                            static_cast<int>(comm::Operation::kAllocate) + 1,
                                            [](comm::Operation one) { return comm::name(one); });
  what.reduce = by_name<ReduceOp>(reader, reader.text(call, "reduce"),
                                  static_cast<int>(ReduceOp::PRODUCT) + 1,
                                  [](ReduceOp one) { return comm::name(one); });
  const auto& dtypes = reader.get(call, "input_dtypes", pickle::kList).items;
  if (dtypes.size() != 1) reader.fail("a call has not one dtype");
  what.type = by_name<c10::ScalarType>(reader, dtypes[0]->text,
                                       static_cast<int>(c10::ScalarType::NumOptions),
                                       [](c10::ScalarType one) { return c10::toString(one); });
  what.root = static_cast<int32_t>(reader.integer(call, "root", INT32_MIN, INT32_MAX));
  what.count = reader.integer(call, "count", 0, INT64_MAX);
  what.identity = reader.integer(call, "identity", INT64_MIN, INT64_MAX);
  // Ranks may send different numbers of elements.
  if (what.operation == comm::Operation::kAllToAll) what.count = 0;
  const std::string& label = reader.text(call, "label");
  std::memcpy(what.label, label.data(), std::min(label.size(), sizeof what.label - 1));
  return what;
}

RecordedCall call_of(const Reader& reader, const Pickled& entry) {
  if (!entry.is(pickle::kDict)) reader.fail("an entry isn't a dict");
  RecordedCall call;
  const auto& group = reader.get(entry, "process_group", pickle::kTuple).items;
  if (group.size() != 2 || !group[0]->is(pickle::kString))
    reader.fail("a call has no communicator");
  call.group = group[0]->text;
  call.sequence = reader.integer(entry, "collective_seq_id", 0, INT64_MAX);
  call.what = description_of(reader, entry);
  call.step = reader.integer(entry, "step", 0, INT64_MAX);
  call.issued_ns = reader.integer(entry, "time_created_ns", 0, INT64_MAX);
  call.started_ns = reader.time(entry, "time_discovered_started_ns");
  call.failed = reader.boolean(entry, "failed");
  if (reader.boolean(entry, "retired"))  // of a failed call nobody knows when
    call.ended_ns = std::max<int64_t>(1, reader.time(entry, "time_discovered_completed_ns"));
  return call;
}

// The folder that has files of ranks: `where` itself, a run's, or the newest below it.
fs::path folder_of(const fs::path& where) {
  std::error_code problem;
  if (!fs::is_directory(where, problem))
    throw Error(formatted("{} isn't a directory.", where),
                "pass a run's directory, or the folder that the error message named.");
  auto has_files = [&](const fs::path& folder) {
    std::error_code unreadable;
    for (const auto& file : fs::directory_iterator(folder, unreadable))
      if (file.path().filename().string().starts_with(kFilePrefix) && file.is_regular_file())
        return true;
    return false;
  };
  if (has_files(where)) return where;
  if (has_files(where / "flight")) return where / "flight";
  fs::path newest;  // names begin with the time
  for (const auto& inner : fs::directory_iterator(where, problem))
    if (inner.is_directory() && has_files(inner.path())) newest = std::max(newest, inner.path());
  return newest;
}

// Whether `pid` was there when its rank wrote the file: numbers of processes are used again.
bool is_same_process(pid_t pid, int64_t before_ns) {
  const std::string line = read_if_there(formatted("/proc/{}/stat", pid));
  std::istringstream system(read_if_there("/proc/stat"));
  std::string word;
  const size_t end = line.rfind(')');
  if (end == std::string::npos) return false;
  std::istringstream fields(line.substr(end + 1));
  for (int i = 0; i < 19; ++i) fields >> word;  // state to itrealvalue
  double started = 0, boot = 0;
  fields >> started;
  while (system >> word && word != "btime") system.ignore(1 << 20, '\n');
  system >> boot;
  const double begun_s = boot + started / static_cast<double>(sysconf(_SC_CLK_TCK));
  return begun_s <= static_cast<double>(before_ns) / 1e9 + 1;
}

// A process that would be killed by SIGUSR2 isn't asked.
bool catches_request(pid_t pid) {
  std::istringstream status(read_if_there(formatted("/proc/{}/status", pid)));
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with("SigCgt:")) continue;
    const std::string mask = line.substr(line.find_first_not_of(" \t", 7));
    uint64_t caught = 0;
    std::from_chars(mask.data(), mask.data() + mask.size(), caught, 16);
    return (caught >> (SIGUSR2 - 1) & 1) != 0;
  }
  return false;
}

fs::file_time_type last_write(const fs::path& file) {
  std::error_code problem;
  const auto time = fs::last_write_time(file, problem);
  return problem ? fs::file_time_type::min() : time;
}

}  // namespace

std::string RecordedCall::text() const {
  return sequence == 0 ? "making the communicator" : what.text();
}

std::string RankFile::process() const {
  if (host_identity != base::host_identity()) return "";
  return is_same_process(pid, written_ns) ? rank_status::thread_state(pid) : "gone";
}

std::string RankFile::whereabouts() const {
  std::string text = step > 0 ? formatted("step {}", step) : "";
  for (const std::string& part : {phase, unit})
    if (!part.empty()) text += (text.empty() ? "" : ", ") + part;
  return text;
}

RankFile read_rank(const fs::path& file) {
  const Reader reader(file);
  const std::string bytes = read_file(file, kLargestFile);
  const pickle::Ref all =
      pickle::read(bytes, file.string(), [](const std::string&) { return false; });
  if (!all->is(pickle::kDict)) reader.fail("it isn't a dict");
  const Pickled& own = reader.get(*all, "fsdp", pickle::kDict);
  RankFile rank;
  rank.rank = static_cast<int>(reader.integer(own, "rank", 0, kMostNamedRanks));
  rank.world = static_cast<int>(reader.integer(own, "world", 1, kMostNamedRanks));
  rank.run = reader.text(own, "run");
  rank.host = reader.text(own, "host");
  rank.host_identity = reader.text(own, "host_identity");
  rank.pid = static_cast<pid_t>(reader.integer(own, "pid", 1, INT32_MAX));
  rank.written_ns = reader.integer(own, "time_ns", 0, INT64_MAX);
  rank.cause = reader.text(own, "cause");
  rank.why = reader.text(own, "why");
  rank.step = reader.integer(own, "step", 0, INT64_MAX);
  rank.phase = reader.text(own, "phase");
  rank.unit = reader.text(own, "unit");
  const Pickled& groups = reader.get(*all, "pg_config", pickle::kDict);
  for (size_t i = 0; i + 1 < groups.items.size(); i += 2) {
    const Pickled& group = *groups.items[i + 1];
    if (!groups.items[i]->is(pickle::kString)) reader.fail("a communicator has no name");
    rank.groups[groups.items[i]->text] = {reader.text(group, "desc"),
                                          ranks_of(reader, reader.text(group, "ranks"))};
  }
  for (const auto& entry : reader.get(*all, "entries", pickle::kList).items) {
    RecordedCall call = call_of(reader, *entry);
    if (!rank.groups.contains(call.group)) reader.fail("a call is on an unknown communicator");
    rank.calls.push_back(std::move(call));
  }
  return rank;
}

RunRanks read_ranks(const fs::path& where) {
  RunRanks ranks;
  ranks.folder = folder_of(where);
  if (ranks.folder.empty())
    throw Error(formatted("{} has no files of the flight recorder.", where),
                "a rank writes one when a collective fails, when it crashes, and after "
                "kill -USR2 PID; where nothing happened there is none.");
  std::vector<RankFile> all;
  for (const auto& file : fs::directory_iterator(ranks.folder)) {
    const std::string name = file.path().filename().string();
    if (!name.starts_with(kFilePrefix)) continue;
    try {
      all.push_back(read_rank(file.path()));
      if (name != kFilePrefix + std::to_string(all.back().rank)) {
        ranks.notes.push_back(
            formatted("{} is left out: it is of rank {}.", name, all.back().rank));
        all.pop_back();
      }
    } catch (const Error& problem) {
      ranks.notes.push_back(problem.message());
    }
  }
  if (all.empty()) throw Error(ranks.notes.front(), "delete the file and ask the ranks again.");
  const auto latest = std::max_element(all.begin(), all.end(), [](const auto& a, const auto& b) {
    return a.written_ns < b.written_ns;
  });
  const std::string run = latest->run;
  const int64_t end_ns = latest->cause == "request" ? 0 : latest->written_ns;
  ranks.world = latest->world;
  for (RankFile& one : all) {
    const int rank = one.rank;
    const double older_s = static_cast<double>(end_ns - one.written_ns) / 1e9;
    if (one.run != run || rank >= ranks.world)
      ranks.notes.push_back(
          formatted("The file of rank {} is left out: it is of another run.", rank));
    else if (one.cause == "request" && older_s > kOlder)
      ranks.notes.push_back(formatted(
          "The file of rank {} is left out: it was asked for {:.0f} s before the failure.", rank,
          older_s));
    else
      ranks.files[rank] = std::move(one);
  }
  return ranks;
}

std::vector<RankProcess> running_ranks(const fs::path& run) {
  std::vector<RankProcess> ranks;
  std::error_code problem;
  if (!fs::exists(run / "events.jsonl", problem)) return ranks;
  const report::RunFiles files = report::read_run(run);
  for (const report::Json& event : files.events) {
    const std::string kind = event.value("event", "");
    const double time_s = event.value("time", 0.0);
    if (kind == "end" || kind == "start" || kind == "resume") ranks.clear();
    if (!event.contains("processes") || !event["processes"].is_array()) continue;
    for (const auto& one : event["processes"]) {
      if (!one.is_object()) continue;
      RankProcess process{.rank = one.value("rank", -1),
                          .host = one.value("host", ""),
                          .host_identity = one.value("host_identity", ""),
                          .pid = one.value("pid", 0)};
      const bool here = process.host_identity == base::host_identity();
      if (process.rank < 0 || process.pid <= 1) continue;
      if (here && !is_same_process(process.pid, static_cast<int64_t>(time_s * 1e9))) continue;
      ranks.push_back(std::move(process));
    }
  }
  return ranks;
}

std::vector<std::string> ask(const std::vector<RankProcess>& ranks, const fs::path& folder) {
  struct Asked {
    const RankProcess* rank;
    fs::path file;
    fs::file_time_type before;
  };
  std::vector<Asked> waiting;
  std::vector<std::string> silent;
  for (const RankProcess& one : ranks) {
    const std::string who = formatted("rank {} (pid {})", one.rank, one.pid);
    if (one.host_identity != base::host_identity()) {
      silent.push_back(formatted("{} runs on {}: kill -USR2 {} there.", who, one.host, one.pid));
    } else if (!catches_request(one.pid)) {
      silent.push_back(formatted("{} doesn't take SIGUSR2.", who));
    } else if (rank_status::thread_state(one.pid) == "stopped") {
      silent.push_back(formatted("{} doesn't answer: stopped.", who));
    } else {
      const fs::path file = folder / (kFilePrefix + std::to_string(one.rank));
      waiting.push_back({&one, file, last_write(file)});
      kill(one.pid, SIGUSR2);
    }
  }
  const auto deadline = std::chrono::steady_clock::now() + kAnswer;
  while (!waiting.empty() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // Ends: at the deadline
    std::erase_if(waiting, [](const Asked& one) {
      return last_write(one.file) != one.before ||
             rank_status::thread_state(one.rank->pid) == "gone";
    });
  }
  for (const Asked& one : waiting)
    silent.push_back(formatted("rank {} (pid {}) doesn't answer: {}.", one.rank->rank,
                               one.rank->pid, rank_status::thread_state(one.rank->pid)));
  return silent;
}

}  // namespace fsdp::cli
