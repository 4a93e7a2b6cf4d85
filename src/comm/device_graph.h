// DeviceGraph: GPU work that is recorded once and launched as a whole many times. Made by the CUDA
// module (modules.h), because libfsdp itself isn't linked to CUDA.
//
// Everything runs on the calling thread's current stream, which must not be the default stream.
// Recording runs nothing. Memory allocated while recording belongs to the graph's pool, and its
// addresses are valid at every replay; graphs that share a pool must be replayed in the order in
// which they were recorded.
#pragma once

namespace fsdp::comm {

class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  // Waits for the device and returns unused memory to it.
  virtual void begin() = 0;
  virtual void end() = 0;  // throws if something was done that can't be recorded
  // Ends a failed recording at any point: stream, allocator and generator are then as they were
  // before. The graph is unusable afterwards.
  virtual void abandon() noexcept = 0;
  virtual void replay() = 0;
};

}  // namespace fsdp::comm
