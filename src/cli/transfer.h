// Transfer: a line on the terminal while a command moves bytes, and the Ctrl-C that ends it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "train/stop.h"

namespace fsdp::cli {

class Transfer {
 public:
  // `verb`: "writing out.safetensors". Nothing is shown where stderr is no terminal.
  Transfer(std::string verb, int64_t total);
  ~Transfer();  // takes the line away

  // After SIGINT or SIGTERM it throws, so that what was begun is removed on the way out.
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

// "5GB", "500MB", "64MiB", "1048576": bytes. An Error for anything else.
int64_t parse_bytes(const std::string& text);

}  // namespace fsdp::cli
