// EventLog: what happened in a run besides its steps, in events.jsonl: one JSON object per line
// with "time" (Unix, in seconds), "step" and "event".
//
// | event | also has |
// |---|---|
// | start, resume | model, ranks, device, backend, precision, parameters, units, steps, version, |
// | | processes: rank, pid, host, host_identity of each rank |
// | warning | name, text, hint |
// | skip | text |
// | checkpoint | name, waited_ms: how long training waited |
// | memory | as memory_record.h writes it |
// | ranks | ranks: rank, host, step_ms, data_ms, comm_ms, memory_mb of each |
// | profile | file |
// | stop, error, out_of_memory | text |
// | end | stopped, seconds: by part |
//
// A resumed run appends, so that the file has all restarts. Readers skip what they don't know.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace fsdp::observe {

class EventLog {
 public:
  // Opens `file` to append; a last line without an end, which a killed run leaves, is removed
  // first. Throws Error.
  explicit EventLog(std::string file);
  ~EventLog();
  EventLog(const EventLog&) = delete;
  EventLog& operator=(const EventLog&) = delete;

  // Writes one line. `facts` is an object, or null.
  void write(const std::string& event, int64_t step, const nlohmann::ordered_json& facts = {});

 private:
  std::string file_;
  int handle_ = -1;
};

}  // namespace fsdp::observe
