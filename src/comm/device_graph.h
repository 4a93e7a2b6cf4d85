// DeviceGraph: work of a GPU that is recorded once and launched as a whole, again and again. Made
// by the CUDA module (modules.h), because libfsdp itself is not linked to CUDA.
//
// Everything is on the current stream of the calling thread, which must not be the default one.
// What is recorded does not run. Memory that is allocated meanwhile belongs to the graph's pool,
// and its addresses are good at every replay; graphs that share a pool must be replayed in the
// order in which they were recorded.
#pragma once

namespace fsdp::comm {

class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  // Waits for the device and gives memory that nobody uses back to it.
  virtual void begin() = 0;
  virtual void end() = 0;  // throws if something was done that cannot be recorded
  // Ends a recording that failed, at any point of it: stream, allocator and generator are then as
  // they were before. The graph is of no use any more.
  virtual void abandon() noexcept = 0;
  virtual void replay() = 0;
};

}  // namespace fsdp::comm
