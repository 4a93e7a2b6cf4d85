// TrustedStream: a TCP connection between two hosts of a run, for bulk data. Neither side reads
// anything else before both have proven the run's secret (base/handshake.h).
//
// Calls wait, so they are for threads of their own. Each ends with an Error if nothing moves for the
// limit, and throws Stopped once the stop is set.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "base/file_descriptor.h"
#include "base/namespace.h"

namespace fsdp::base {

// Ends the waits of a thread; the thread's owner sets it.
class StopEvent {
 public:
  StopEvent();
  void set() noexcept;
  bool is_set() const;
  int fd() const { return event_.get(); }  // readable once it is set

 private:
  FileDescriptor event_;
};
struct Stopped {};

struct StreamTerms {
  std::string secret, context;      // of the handshake
  std::chrono::milliseconds limit;  // without progress
  const StopEvent& stop;
};

class TrustedStream {
 public:
  // Tries until the limit, so the other side may begin to listen later.
  static TrustedStream connect(const std::string& host, int port, const StreamTerms& terms);
  // Waits without a limit for one that proves the secret. Others are dropped.
  static TrustedStream accept(const FileDescriptor& listener, const StreamTerms& terms);

  void send(std::string_view bytes);
  // The next line, without its end. `patience`: wait for it without a limit.
  std::string line(bool patience = false);
  // Passes on the next `size` bytes.
  void receive(int64_t size, const std::function<void(const char*, size_t)>& use);

 private:
  TrustedStream(FileDescriptor socket, std::string received, const StreamTerms& terms);
  void await_bytes(bool patience);
  void receive_text(bool patience);
  size_t read(char* into, size_t most);

  FileDescriptor socket_;
  std::string peer_;      // for messages
  std::string received_;  // and not yet used
  StreamTerms terms_;
};

}  // namespace fsdp::base
