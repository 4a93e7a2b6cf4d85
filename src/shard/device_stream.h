// Streams and events of whatever device the parameters are on. On the CPU there are none, and
// everything here does nothing: operations are done when they return.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

namespace fsdp::shard {

inline bool has_streams(at::Device device) {
  return !device.is_cpu() && !device.is_meta();
}

inline c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// A point in the current stream that another stream can wait for.
class Moment {
 public:
  Moment() = default;
  void record(at::Device device) {
    if (!has_streams(device)) return;
    if (!event_) event_.emplace(device.type());
    event_->record(current_stream(device));
    recorded_ = true;
  }
  // Work put on the current stream from now on waits for it.
  void wait(at::Device device) const {
    if (recorded_) event_->block(current_stream(device));
  }
  bool recorded() const { return recorded_; }

 private:
  std::optional<c10::Event> event_;
  bool recorded_ = false;
};

// A stream of our own beside the compute stream.
class SideStream {
 public:
  SideStream() = default;
  explicit SideStream(at::Device device) {
    if (has_streams(device))
      stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, true);
  }
  const std::optional<c10::Stream>& get() const { return stream_; }

 private:
  std::optional<c10::Stream> stream_;
};

// While alive, the side stream is the current one.
class OnStream {
 public:
  explicit OnStream(const SideStream& side) {
    if (side.get()) guard_.emplace(*side.get());
  }

 private:
  std::optional<c10::StreamGuard> guard_;
};

}  // namespace fsdp::shard
