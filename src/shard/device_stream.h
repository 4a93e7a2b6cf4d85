// Streams and events of the device the parameters are on. The CPU has none, and everything here
// does nothing: operations are done when they return.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <optional>
#include <utility>
#include <vector>

namespace fsdp::shard {

inline bool has_streams(at::Device device) {
  return !device.is_cpu() && !device.is_meta();
}

inline c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// A point in a stream that other streams and the host can wait for.
class StreamEvent {
 public:
  StreamEvent() = default;
  void record(at::Device device) {
    if (!has_streams(device)) return;
    if (!event_) event_.emplace(device.type());
    event_->record(current_stream(device));
    recorded_ = true;
  }
  // Work put on the current stream from now on waits for the event.
  void wait(at::Device device) const {
    if (recorded_) event_->block(current_stream(device));
  }
  // The host waits for the event.
  void synchronize() const {
    if (recorded_) event_->synchronize();
  }
  bool passed() const { return !recorded_ || event_->query(); }
  bool recorded() const { return recorded_; }
  void forget() {
    event_.reset();
    recorded_ = false;
  }

 private:
  std::optional<c10::Event> event_;
  bool recorded_ = false;
};

// Measures how long the current stream waits for others, with timed events before and after each
// wait. Off by default.
class Stalls {
 public:
  bool on = false;

  void wait(const StreamEvent& event, at::Device device) {
    if (!on || !event.recorded()) return event.wait(device);
    std::pair<c10::Event, c10::Event> ends{timed(device), timed(device)};
    ends.first.record(current_stream(device));
    event.wait(device);
    ends.second.record(current_stream(device));
    open_.push_back(std::move(ends));
  }
  // The total of the waits since the last call. Waits for the device to finish them.
  std::chrono::nanoseconds take() {
    double ms = 0;
    for (auto& [before, after] : open_) {
      after.synchronize();
      ms += before.elapsedTime(after);
    }
    open_.clear();
    return std::chrono::nanoseconds(static_cast<int64_t>(ms * 1e6));
  }

 private:
  static c10::Event timed(at::Device device) {
    return c10::Event(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  }
  std::vector<std::pair<c10::Event, c10::Event>> open_;
};

// A stream beside the compute stream.
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
