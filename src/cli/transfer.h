// Transfer: a progress line while a command moves bytes, which SIGINT and SIGTERM stop.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "train/stop.h"

namespace fsdp::cli {

class Transfer {
 public:
  // `verb`: "writing out.safetensors". Shows nothing if stderr isn't a terminal.
  Transfer(std::string verb, int64_t total);
  ~Transfer();  // erases the line

  // Throws after SIGINT or SIGTERM, so that the caller removes its partial output.
  void advance(int64_t bytes);
  std::function<void(int64_t)> advancing() {
    return [this](int64_t bytes) { advance(bytes); };
  }

 private:
  void draw();

  std::string verb_;
  int64_t total_, done_ = 0;
  int width_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point begun_, shown_;
  train::StopSignals signals_;
};

// "5GB", "500MB", "64MiB", "1048576": bytes. Throws an Error for anything else.
int64_t parse_bytes(const std::string& text);

}  // namespace fsdp::cli
