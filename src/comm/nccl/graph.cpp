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

// LibTorch has no way back from a failed recording: its allocator would go on keeping memory for
// the pool, and its generator would refuse to draw. Both are put right here.
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
    (void)cudaGetLastError();  // it says that the recording is invalid, which is known
    if (!capture_ended_) {
      try {
        c10::cuda::CUDACachingAllocator::endAllocateToPool(capture_dev_, mempool_id_);
      } catch (const std::exception&) {  // that much was reached
      }
      try {
        at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(mempool_id_);
      } catch (const std::exception&) {
      }
      capture_ended_ = true;  // so that reset() gives the pool back
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
    // Relaxed: other threads (autograd's, NCCL's, a save's) call CUDA as they like meanwhile.
    graph_.capture_begin(pool_, cudaStreamCaptureModeRelaxed);
  }

  void end() override {
    // Asked first: LibTorch's end throws half-way through where the recording is invalid.
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::Active)
      throw Error("the device was waited for, or did something else that a graph cannot hold.", "");
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
