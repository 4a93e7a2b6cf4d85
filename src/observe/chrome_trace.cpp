#include "observe/chrome_trace.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <map>
#include <optional>

#include "base/file_error.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "base/shallow_json.h"
#include "fsdp/error.h"
#include "observe/families.h"

namespace fsdp::observe {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr int64_t kUnitLane = 0;       // of a rank's process: which unit its operators work on
constexpr int64_t kFirstStream = 100;  // lanes before it are threads

std::string dumped(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

[[noreturn]] void fail_to_trace(const fs::path& file) {
  const int why = errno;
  throw Error(formatted("can't write the trace to {}: {}.", file, errno_text(why)), file_hint(why));
}

const char* category_of(TraceSpan::Kind kind) {
  constexpr const char* kNames[] = {"operator", "scope", "runtime", "kernel", "copy"};
  return kNames[kind];
}

class PartWriter {
 public:
  PartWriter(const StepTrace& trace, std::ostream& out) : trace_(trace), out_(out) {
    for (const TraceSpan& span : trace.spans) {
      begin_ = begin_ ? std::min(*begin_, span.begin) : span.begin;
      lane_of(span);
    }
  }

  int64_t begin() const { return begin_.value_or(0); }

  void write() {
    name("process_name", kUnitLane, formatted("rank {} ({})", trace_.rank, trace_.host));
    line({{"name", "process_sort_index"},
          {"ph", "M"},
          {"pid", trace_.rank},
          {"tid", kUnitLane},
          {"args", {{"sort_index", trace_.rank}}}});
    name("thread_name", kUnitLane, "units");
    for (const auto& [key, lane] : lanes_)
      name("thread_name", lane,
           key.first ? formatted("stream {}", key.second) : formatted("thread {}", key.second));
    for (const TraceSpan& span : trace_.spans) write(span);
    write_units();
  }

 private:
  void line(const Json& event) { out_ << dumped(event) << "\n"; }

  void name(const char* what, int64_t lane, const std::string& text) {
    line({{"name", what},
          {"ph", "M"},
          {"pid", trace_.rank},
          {"tid", lane},
          {"args", {{"name", text}}}});
  }

  int64_t lane_of(const TraceSpan& span) {
    const auto key = std::pair(span.on_device(), span.lane);
    const auto found = lanes_.find(key);
    if (found != lanes_.end()) return found->second;
    const auto count = static_cast<int64_t>(lanes_.size()) + 1;
    return lanes_[key] = (span.on_device() ? kFirstStream : 0) + count;
  }

  double us(int64_t time) const { return static_cast<double>(time - begin()) / 1e3; }

  void write(const TraceSpan& span) {
    const int64_t lane = lane_of(span);
    Json event = {{"ph", "X"},
                  {"name", span.name},
                  {"cat", category_of(span.kind)},
                  {"pid", trace_.rank},
                  {"tid", lane},
                  {"ts", us(span.begin)},
                  {"dur", static_cast<double>(span.end - span.begin) / 1e3}};
    if (span.kind == TraceSpan::kKernel)
      event["args"] = {{"family", family_name(family_of(span.name))}};
    line(event);
    // An arrow from the call to its kernel.
    const int64_t arrow = span.on_device() ? span.launch : span.id;
    if (arrow == 0 || (!span.on_device() && span.kind != TraceSpan::kRuntime)) return;
    Json end = {{"ph", span.on_device() ? "f" : "s"},
                {"name", "launch"},
                {"cat", "launch"},
                {"id", formatted("{}.{}", trace_.rank, arrow)},
                {"pid", trace_.rank},
                {"tid", lane},
                {"ts", us(span.begin)}};
    if (span.on_device()) end["bp"] = "e";
    line(end);
  }

  // Of the first thread that reads parameters, which runs forward.
  void write_units() {
    const UnitMark* open = nullptr;
    auto close = [&](int64_t at) {
      if (open && at > open->at)
        line({{"ph", "X"},
              {"name", open->unit},
              {"cat", "unit"},
              {"pid", trace_.rank},
              {"tid", kUnitLane},
              {"ts", us(open->at)},
              {"dur", static_cast<double>(at - open->at) / 1e3}});
    };
    int64_t end = begin();
    for (const TraceSpan& span : trace_.spans)
      if (!span.on_device()) end = std::max(end, span.end);
    for (const UnitMark& mark : trace_.marks) {
      close(mark.at);
      open = &mark;
    }
    close(end);
  }

  const StepTrace& trace_;
  std::ostream& out_;
  std::optional<int64_t> begin_;
  std::map<std::pair<bool, int64_t>, int64_t> lanes_;  // (on a device, number) to a lane
};

struct TracePart {
  fs::path file;
  Json header;
  int64_t shift = 0;  // ns, to the common clock
};

std::vector<TracePart> find_parts(const std::vector<fs::path>& files) {
  std::vector<TracePart> parts;
  for (const fs::path& file : files) {
    const RegularFile in(file);
    std::string line;
    if (!in.is_open() || !LineReader(in).next(line)) continue;
    Json header = parse_shallow<Json>(line);
    if (header.is_object() && header.contains("begin_ns") && header.contains("met_ns"))
      parts.push_back({file, std::move(header)});
  }
  return parts;
}

// Hosts agree on when the first of their ranks left the barrier; the first part's host has the
// clock, and its earliest event is time 0.
void align(std::vector<TracePart>& parts) {
  std::map<std::string, int64_t> met;
  for (const TracePart& part : parts) {
    const auto at = part.header["met_ns"].get<int64_t>();
    const auto [place, added] = met.emplace(part.header.value("host", ""), at);
    if (!added) place->second = std::min(place->second, at);
  }
  std::optional<int64_t> first;
  for (TracePart& part : parts) {
    const int64_t late =
        met[part.header.value("host", "")] - met[parts.front().header.value("host", "")];
    part.shift = part.header["begin_ns"].get<int64_t>() - late;
    first = first ? std::min(*first, part.shift) : part.shift;
  }
  for (TracePart& part : parts) part.shift -= *first;
}

}  // namespace

void write_trace_part(const StepTrace& trace, const Json& more, const fs::path& file) {
  std::ofstream out(place_of_file(file), std::ios::trunc);
  PartWriter writer(trace, out);
  Json header = {{"rank", trace.rank},
                 {"host", trace.host},
                 {"step", trace.step},
                 {"begin_ns", writer.begin()},
                 {"met_ns", trace.met}};
  if (more.is_object()) header.update(more);
  out << dumped(header) << "\n";
  writer.write();
  out.flush();
  if (!out) fail_to_trace(file);
}

std::vector<Json> merge_trace_parts(const std::vector<fs::path>& files, const fs::path& file) {
  std::vector<TracePart> parts = find_parts(files);
  if (!parts.empty()) align(parts);
  const fs::path draft = file.string() + ".partial";
  std::ofstream out(place_of_file(draft), std::ios::trunc);
  out << "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
  bool first = true;
  std::vector<Json> headers;
  for (const TracePart& part : parts) {
    const RegularFile in(part.file);
    LineReader lines(in.or_throw());
    std::string line;
    lines.next(line);  // the header
    while (lines.next(line)) {
      Json event = parse_shallow<Json>(line);
      if (!event.is_object()) continue;
      if (event.contains("ts"))
        event["ts"] = event["ts"].get<double>() + static_cast<double>(part.shift) / 1e3;
      out << (first ? "\n" : ",\n") << dumped(event);
      first = false;
    }
    headers.push_back(part.header);
  }
  out << "\n]}\n";
  out.close();
  if (!out) fail_to_trace(file);
  fs::rename(draft, file);
  std::error_code ignored;  // a part that stays is only in the way
  for (const TracePart& part : parts) fs::remove(part.file, ignored);
  return headers;
}

}  // namespace fsdp::observe
