#include "observe/metrics.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/file_error.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "fsdp/error.h"

namespace fsdp::observe {
namespace {

using Json = nlohmann::ordered_json;

Json number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
  return value;
}

[[noreturn]] void fail(const std::string& what, const std::string& file) {
  int why = errno;
  throw Error(formatted("can't {} {}: {}.", what, file, errno_text(why)), file_hint(why));
}

void write_all(int handle, std::string_view text, const std::string& file) {
  while (!text.empty()) {
    ssize_t done = ::write(handle, text.data(), text.size());
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) fail("write", file);
    text.remove_prefix(static_cast<size_t>(done));
  }
}

// The step of a complete line; nullopt if it isn't a record.
std::optional<int64_t> step_of(const std::string& line) {
  Json record = Json::parse(line, nullptr, false);
  if (!record.is_object() || !record.contains("step")) return {};
  const Json& step = record["step"];
  if (!step.is_number_integer()) return {};
  return step.get<int64_t>();
}

// The lines up to and including step `last`. A killed run may have left an incomplete line at the
// end. Lines that aren't records are dropped.
std::string kept_lines(const std::string& file, int64_t last) {
  const RegularFile in(file);
  if (in.code() == ENOENT) return "";
  LineReader lines(in.or_throw());
  std::string kept;
  for (std::string line; lines.next(line);) {
    if (!lines.complete()) break;
    auto step = step_of(line);
    if (step && *step <= last) kept += line + "\n";
  }
  return kept;
}

void replace(const std::string& file, const std::string& text) {
  std::string draft = file + ".partial";
  constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC;
  int handle = ::open(place_of_file(draft).c_str(), kFlags, 0666);
  if (handle < 0) fail("write", draft);
  try {
    write_all(handle, text, draft);
    if (::fsync(handle) != 0) fail("write", draft);
  } catch (...) {
    ::close(handle);
    ::unlink(draft.c_str());
    throw;
  }
  ::close(handle);
  if (::rename(draft.c_str(), file.c_str()) != 0) fail(formatted("rename {} to", draft), file);
}

}  // namespace

std::string to_json(const StepRecord& record) {
  Json line;
  auto known = [&](const char* key, const std::optional<double>& value) {
    if (value) line[key] = number(*value);
  };
  line["step"] = record.step;
  line["loss"] = number(record.loss);
  known("grad_norm", record.grad_norm);
  line["lr"] = number(record.lr);
  line["tokens"] = record.tokens;
  line["tokens_per_s"] = number(record.tokens_per_s);
  if (record.tflops > 0) line["tflops"] = number(record.tflops);
  known("mfu", record.mfu);
  line["memory_mb"] = number(record.memory_mb);
  line["step_ms"] = number(record.step_ms);
  line["data_ms"] = number(record.data_ms);
  known("comm_ms", record.comm_ms);
  auto each = [&](const char* key, const std::vector<double>& values) {
    for (double value : values) line[key].push_back(number(std::round(value * 1e3) / 1e3));
  };
  each("rank_step_ms", record.rank_step_ms);
  each("rank_wait_ms", record.rank_wait_ms);
  line["epoch"] = number(record.epoch);
  line["skipped"] = record.skipped;
  known("scale", record.scale);
  known("reward_chosen", record.reward_chosen);
  known("reward_rejected", record.reward_rejected);
  known("reward_accuracy", record.reward_accuracy);
  known("expert_load_most", record.expert_load_most);
  known("expert_load_least", record.expert_load_least);
  known("router_entropy", record.router_entropy);
  known("dropped_tokens", record.dropped_tokens);
  for (const std::vector<double>& mixture : record.expert_load) {
    Json list = Json::array();
    for (double load : mixture) list.push_back(number(std::round(load * 1e3) / 1e3));
    line["expert_load"].push_back(std::move(list));
  }
  known("eval_loss", record.eval_loss);
  known("eval_perplexity", record.eval_perplexity);
  return line.dump();
}

MetricsLog::MetricsLog(std::string file, int64_t resume_step) : file_(std::move(file)) {
  replace(file_, resume_step > 0 ? kept_lines(file_, resume_step) : "");
  handle_ = ::open(place_of_file(file_).c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (handle_ < 0) fail("open", file_);
}

MetricsLog::~MetricsLog() {
  ::close(handle_);
}

void MetricsLog::write(const StepRecord& record) {
  write_all(handle_, to_json(record) + "\n", file_);
}

}  // namespace fsdp::observe
