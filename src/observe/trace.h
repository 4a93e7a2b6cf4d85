// Trace: a recording of LibTorch's profiler between start() and save(), which must be called on the
// same thread. A process can have one at a time.
#pragma once

#include <string>

namespace fsdp::observe {

class Trace {
 public:
  Trace() = default;
  ~Trace();  // drops a recording that wasn't saved
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  void start();
  void save(const std::string& path);

 private:
  bool on_ = false;
};

}  // namespace fsdp::observe
