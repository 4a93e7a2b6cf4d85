#include "cli/hang_story.h"

#include <algorithm>
#include <climits>
#include <iterator>
#include <optional>
#include <set>

#include "base/format.h"
#include "base/table.h"

namespace fsdp::cli {
namespace {

constexpr double kShortWait = 1;       // seconds
constexpr size_t kLongestError = 300;  // characters of an error that are shown

// Where a rank is on a communicator: the first call that hasn't finished, and the last one at all.
struct RankProgress {
  int64_t issued = -1;  // the last call's number; -1: none
  const RecordedCall* last = nullptr;
  const RecordedCall* stuck = nullptr;
};

struct CommunicatorView {
  std::string name;
  RecordedGroup group;
  std::map<int, RankProgress> ranks;  // those with a file
};

std::vector<CommunicatorView> views(const RunRanks& run) {
  std::map<std::string, CommunicatorView> found;
  for (const auto& [rank, file] : run.files)
    for (const auto& [name, group] : file.groups) {
      CommunicatorView& view = found[name];
      view.name = name;
      view.group = group;
    }
  for (auto& [name, view] : found)
    for (int rank : view.group.ranks) {
      auto file = run.files.find(rank);
      if (file == run.files.end()) continue;
      RankProgress& at = view.ranks[rank];
      for (const RecordedCall& call : file->second.calls) {
        if (call.group != name) continue;
        if (call.sequence > at.issued) {
          at.issued = call.sequence;
          at.last = &call;
        }
        const bool earlier = !at.stuck || call.sequence < at.stuck->sequence;
        if (call.unfinished() && earlier) at.stuck = &call;
      }
    }
  std::vector<CommunicatorView> all;
  for (auto& [name, view] : found) all.push_back(std::move(view));
  return all;
}

// A call that some ranks wait in, and who hasn't come.
struct Wait {
  const CommunicatorView* view = nullptr;
  const RecordedCall* call = nullptr;
  std::vector<int> inside, absent;
};

std::vector<Wait> waits(const std::vector<CommunicatorView>& all) {
  std::vector<Wait> found;
  for (const CommunicatorView& view : all) {
    const RecordedCall* first = nullptr;
    for (const auto& [rank, at] : view.ranks)
      if (at.stuck && (!first || at.stuck->sequence < first->sequence)) first = at.stuck;
    if (!first) continue;
    Wait wait;
    wait.view = &view;
    wait.call = first;
    for (int rank : view.group.ranks) {
      auto at = view.ranks.find(rank);
      if (at == view.ranks.end() || at->second.issued < first->sequence)
        wait.absent.push_back(rank);
      else if (at->second.stuck && at->second.stuck->sequence == first->sequence)
        wait.inside.push_back(rank);
    }
    found.push_back(std::move(wait));
  }
  std::sort(found.begin(), found.end(),
            [](const Wait& a, const Wait& b) { return a.call->issued_ns < b.call->issued_ns; });
  return found;
}

// The first call at which ranks differ, by the time it was made.
struct Difference {
  const CommunicatorView* view = nullptr;
  int64_t sequence = 0;
  int64_t issued_ns = 0;
  std::vector<std::pair<std::vector<int>, std::string>> calls;
};

std::optional<Difference> first_difference(const RunRanks& run,
                                           const std::vector<CommunicatorView>& all) {
  std::optional<Difference> found;
  for (const CommunicatorView& view : all) {
    std::map<int64_t, std::vector<std::pair<int, const RecordedCall*>>> by_number;
    for (const auto& [rank, at] : view.ranks)
      for (const RecordedCall& call : run.files.at(rank).calls)
        if (call.group == view.name) by_number[call.sequence].emplace_back(rank, &call);
    for (const auto& [sequence, calls] : by_number) {
      const RecordedCall& one = *calls[0].second;
      const bool agree = std::all_of(calls.begin(), calls.end(), [&](const auto& call) {
        return call.second->what.agrees_with(one.what);
      });
      if (agree) continue;
      if (found && found->issued_ns <= one.issued_ns) break;
      found = Difference{&view, sequence, one.issued_ns, {}};
      for (const auto& [rank, call] : calls) {
        const std::string text = call->text();
        auto same = std::find_if(found->calls.begin(), found->calls.end(),
                                 [&](const auto& group) { return group.second == text; });
        if (same == found->calls.end()) same = found->calls.insert(same, {{}, text});
        same->first.push_back(rank);
      }
      break;  // what follows a difference differs, too
    }
  }
  return found;
}

double seconds_between(int64_t from_ns, int64_t to_ns) {
  return std::max(0.0, static_cast<double>(to_ns - from_ns) / 1e9);
}

std::string in_seconds(double seconds) {
  return formatted("{:.{}f} s", seconds, seconds < 10 ? 1 : 0);
}

std::string who(const RankFile& file) {
  return formatted("rank {} ({}, pid {})", file.rank, file.host, file.pid);
}

// Of a rank that hasn't reached a call on `view`.
std::string where_is(const RunRanks& run, const CommunicatorView& view, int rank) {
  auto found = run.files.find(rank);
  if (found == run.files.end())
    return formatted("rank {} has no file: it was killed, it ended, or it can't write here", rank);
  const RankFile& file = found->second;
  std::string text = who(file);
  std::string state = file.process();
  if (state == "stopped" || (state == "gone" && file.cause == "request")) text += ", " + state;
  const std::string at = file.whereabouts();
  if (!at.empty()) text += ", " + at;
  const RankProgress& progress = view.ranks.at(rank);
  for (const RecordedCall& call : file.calls)
    if (call.unfinished() && call.group != view.name)
      return text + formatted("; it waits in call {} on \"{}\": {}", call.sequence, call.group,
                              call.text());
  if (!progress.last) return text + "; it has made no call here";
  text +=
      formatted("; its last call here was {}, {}", progress.last->sequence, progress.last->text());
  if (!progress.last->unfinished())
    text += formatted(", done {} before its file",
                      in_seconds(seconds_between(progress.last->ended_ns, file.written_ns)));
  return text;
}

std::string short_error(const RankFile& file) {
  std::string line = file.why.substr(0, file.why.find('\n'));
  const std::string prefix = formatted("rank {}: ", file.rank);
  if (line.starts_with(prefix)) line = line.substr(prefix.size());
  if (line.size() > kLongestError) line = line.substr(0, kLongestError) + "…";
  return line;
}

// The error of the rank that wrote first: the others' follow from it.
std::string first_error(const RunRanks& run) {
  const RankFile* first = nullptr;
  for (const auto& [rank, file] : run.files)
    if (file.cause != "request" && (!first || file.written_ns < first->written_ns)) first = &file;
  return first ? formatted("rank {} said: {}", first->rank, short_error(*first)) : "";
}

const RankFile* crashed(const RunRanks& run) {
  for (const auto& [rank, file] : run.files)
    if (file.cause == "crash") return &file;
  return nullptr;
}

std::string advice_for(const RunRanks& run, int rank) {
  auto found = run.files.find(rank);
  if (found == run.files.end())
    return formatted(
        "see what rank {} printed last; after a silent SIGKILL look for the kernel's reason with "
        "dmesg.",
        rank);
  const RankFile& file = found->second;
  if (file.process() == "stopped") return formatted("kill -CONT {} resumes it.", file.pid);
  if (file.process() == "gone" && file.cause == "request")
    return formatted("its process has ended: see what rank {} printed last.", rank);
  if (file.cause == "fault")
    return formatted("rank {} gave up by itself, and its own error matters: {}", rank,
                     short_error(file));
  return formatted(
      "see where it is: gdb -p {} -batch -ex 'thread apply all bt' on {}; if it is only slow, "
      "raise "
      "FSDP_TIMEOUT.",
      file.pid, file.host);
}

void describe_call(HangStory& story, const CommunicatorView& view, int64_t sequence,
                   const RecordedCall* call) {
  story.group = view.name;
  story.backend = view.group.backend;
  story.size = static_cast<int>(view.group.ranks.size());
  story.sequence = sequence;
  if (call) story.call = call->text();
}

void describe_wait(HangStory& story, const RunRanks& run, const Wait& wait) {
  describe_call(story, *wait.view, wait.call->sequence, wait.call);
  for (int rank : wait.inside) {
    const RecordedCall& call = *wait.view->ranks.at(rank).stuck;
    const int64_t since = call.started_ns != 0 ? call.started_ns : call.issued_ns;
    story.waiting.push_back({rank, seconds_between(since, run.files.at(rank).written_ns)});
  }
  for (int rank : wait.absent) story.missing.push_back({rank, where_is(run, *wait.view, rank)});
}

double longest_s(const HangStory& story) {
  double longest = 0;
  for (const HangStory::Waiting& one : story.waiting) longest = std::max(longest, one.since_s);
  return longest;
}

// Chooses the wait to tell. A rank that waits itself isn't to blame for those that wait for it.
void tell_wait(HangStory& story, const RunRanks& run, const std::vector<Wait>& all) {
  std::set<int> blocked;
  for (const Wait& wait : all)
    if (!wait.absent.empty()) blocked.insert(wait.inside.begin(), wait.inside.end());
  for (const Wait& wait : all)
    for (int rank : wait.absent) {
      if (blocked.contains(rank)) continue;
      story.kind = HangStory::kMissing;
      describe_wait(story, run, wait);
      // Those that wait elsewhere come when the others have.
      std::erase_if(story.missing,
                    [&](const HangStory::Missing& one) { return blocked.contains(one.rank); });
      story.next = advice_for(run, rank);
      return;
    }
  const auto crossed =
      std::find_if(all.begin(), all.end(), [](const Wait& wait) { return !wait.absent.empty(); });
  const Wait& wait = crossed != all.end() ? *crossed : all.front();
  describe_wait(story, run, wait);
  story.kind = crossed != all.end() ? HangStory::kOrder : HangStory::kTogether;
  story.next = crossed != all.end()
                   ? "each of these ranks waits on one communicator for a rank that waits on "
                     "another: make their calls in the same order on all ranks."
                   : "all ranks are in this call: look at the network, or ask again (they may be "
                     "under way).";
}

}  // namespace

HangStory tell(const RunRanks& run) {
  HangStory story;
  const std::vector<CommunicatorView> all = views(run);
  const std::vector<Wait> waiting = waits(all);
  story.said = first_error(run);
  if (const RankFile* file = crashed(run)) {
    story.kind = HangStory::kCrash;
    story.said.clear();  // the missing line has it
    if (!waiting.empty()) describe_wait(story, run, waiting.front());
    std::erase_if(story.waiting, [&](const auto& one) { return one.rank == file->rank; });
    const std::string at = file->whereabouts();
    story.missing = {{file->rank, formatted("{} crashed ({}){}{}", who(*file), short_error(*file),
                                            at.empty() ? "" : ", ", at)}};
    story.next = "see what that rank printed last; fsdp run shows how to run it in a debugger.";
    return story;
  }
  if (const auto differ = first_difference(run, all)) {
    story.kind = HangStory::kMismatch;
    describe_call(story, *differ->view, differ->sequence, nullptr);
    story.calls = differ->calls;
    story.next =
        "the ranks took different paths, or have different shapes: look for an if on the rank or "
        "on data before this call (docs/hangs.md).";
    return story;
  }
  if (!waiting.empty()) {
    tell_wait(story, run, waiting);
    if (story.said.empty() && longest_s(story) < kShortWait)
      story.next += " A wait this short may be the run going on: ask again.";
  } else {
    story.next = story.said.empty()
                     ? "no rank waits for another in a collective: if nothing moves, see where the "
                       "threads are with gdb -p PID -batch -ex 'thread apply all bt'."
                     : "no collective was under way: the error itself says why.";
  }
  return story;
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i;
    while (end + 1 < ranks.size() && ranks[end + 1] == ranks[end] + 1) ++end;
    text += formatted("{}{}", text.empty() ? "" : ", ", ranks[i]);
    if (end > i) text += formatted("{}{}", end == i + 1 ? ", " : "-", ranks[end]);
    i = end + 1;
  }
  return formatted("{} {}", ranks.size() == 1 ? "rank" : "ranks", text);
}

std::string describe(const HangStory& story) {
  std::string text;
  auto line = [&](const char* title, const std::string& what) {
    if (!what.empty()) text += formatted("{:<9}{}\n", std::string_view(title), what);
  };
  if (!story.group.empty())
    line("call", formatted("{} on communicator \"{}\" ({}, {}){}{}", story.sequence, story.group,
                           story.backend, count_of(story.size, "rank"),
                           story.call.empty() ? "" : ": ", story.call));
  if (story.kind == HangStory::kNothing) line("call", "every recorded call has finished");
  std::vector<int> inside;
  for (const HangStory::Waiting& one : story.waiting) inside.push_back(one.rank);
  if (!inside.empty())
    line("waiting", formatted("{}, for {}", rank_list(inside), in_seconds(longest_s(story))));
  const char* title = story.kind == HangStory::kCrash ? "crashed" : "missing";
  for (size_t i = 0; i < story.missing.size() && i < 3; ++i) line(title, story.missing[i].where);
  if (story.missing.size() > 3)
    line(title, formatted("and {} more",
                          count_of(static_cast<int64_t>(story.missing.size()) - 3, "rank")));
  for (size_t i = 0; i < story.calls.size() && i < 4; ++i)
    line("differs", formatted("{}: {}", rank_list(story.calls[i].first), story.calls[i].second));
  line("said", story.said);
  line("next", story.next);
  return text;
}

nlohmann::ordered_json to_json(const HangStory& story) {
  constexpr const char* kKinds[] = {"nothing", "crash", "missing", "together", "mismatch", "order"};
  nlohmann::ordered_json json{{"kind", kKinds[story.kind]}, {"communicator", story.group},
                              {"backend", story.backend},   {"sequence", story.sequence},
                              {"call", story.call},         {"said", story.said},
                              {"next", story.next}};
  for (const char* list : {"waiting", "missing", "calls"})
    json[list] = nlohmann::ordered_json::array();
  for (const auto& one : story.waiting)
    json["waiting"].push_back({{"rank", one.rank}, {"since_s", one.since_s}});
  for (const auto& one : story.missing)
    json["missing"].push_back({{"rank", one.rank}, {"where", one.where}});
  for (const auto& [ranks, call] : story.calls)
    json["calls"].push_back({{"ranks", ranks}, {"call", call}});
  return json;
}

}  // namespace fsdp::cli
