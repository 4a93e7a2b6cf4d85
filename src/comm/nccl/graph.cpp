#include "comm/nccl/graph.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

// LibTorch can't recover from a failed recording: its allocator would keep reserving memory for the
// pool, and its generator would refuse to draw. undo() resets both.
class Recording : public at::cuda::CUDAGraph {
 public:
  void undo() {
    for (auto& [state, increment] : captured_generator_states_) state->capturing_ = false;
    if (capture_dev_ == UNDEFINED_DEVICE) return;  // it never began
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(capture_stream_, &status);
    if (status != cudaStreamCaptureStatusNone) {
      cudaGraph_t unfinished = nullptr;
      cudaStreamEndCapture(capture_stream_, &unfinished);
      if (unfinished) cudaGraphDestroy(unfinished);
    }
    (void)cudaGetLastError();  // clears the error that the recording is invalid
    if (!capture_ended_) {
      try {
        c10::cuda::CUDACachingAllocator::endAllocateToPool(capture_dev_, mempool_id_);
      } catch (const std::exception&) {  // allocating to the pool had not begun
      }
      try {
        at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(mempool_id_);
      } catch (const std::exception&) {
      }
      capture_ended_ = true;  // so that reset() releases the pool
    }
    reset();
  }
};

class CudaGraph : public DeviceGraph {
 public:
  explicit CudaGraph(const CudaGraph* sibling)
      : pool_(sibling ? sibling->pool_ : at::cuda::graph_pool_handle()) {}

  void begin() override {
    c10::cuda::device_synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();
    // Relaxed: other threads (autograd, NCCL, a save) may call CUDA meanwhile.
    graph_.capture_begin(pool_, cudaStreamCaptureModeRelaxed);
  }

  void end() override {
    // Checked first: LibTorch's capture_end throws half-way through if the recording is invalid.
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::Active)
      throw Error(
          "the code waited for the device, or did something else that a graph can't record.", "");
    graph_.capture_end();
  }

  void abandon() noexcept override {
    try {
      graph_.undo();
    } catch (const std::exception&) {  // nothing more can be done
    }
  }

  void replay() override { graph_.replay(); }

 private:
  c10::MempoolId_t pool_;
  Recording graph_;
};

}  // namespace

std::unique_ptr<DeviceGraph> make_graph(const DeviceGraph* sibling) {
  return std::make_unique<CudaGraph>(static_cast<const CudaGraph*>(sibling));
}

}  // namespace fsdp::comm
