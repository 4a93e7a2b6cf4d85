// Trace: what LibTorch's profiler sees between start() and save(), which must be called on one
// thread. Only one can be on at a time in a process.
#pragma once

#include <string>

namespace fsdp::observe {

class Trace {
 public:
  Trace() = default;
  ~Trace();  // one that was not saved is dropped
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  void start();
  void save(const std::string& path);

 private:
  bool on_ = false;
};

}  // namespace fsdp::observe
