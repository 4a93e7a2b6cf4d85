// Products of one-byte matrices on CUDA, by cuBLASLt: it adds to a float32 gradient in place, which
// LibTorch's operators for fp8 can't. Its functions come with libtorch_cuda, which is loaded
// anyway.
//
// Nothing waits, and the workspace comes from LibTorch's allocator: a product may be captured into
// a graph. Which algorithm to use is asked once per shape.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <cublasLt.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <tuple>

#include "base/format.h"
#include "base/mutex.h"
#include "fsdp/error.h"
#include "kernels/fp8.h"

namespace fsdp::kernels {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

constexpr size_t kWorkspace = 32 << 20;  // what Hopper's kernels ask for at most

void check(cublasStatus_t status, const char* what, const fp8::Product& size) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(
      formatted("cuBLASLt can't {} of {} x {} x {} in fp8: {}.", what, size.m, size.n, size.k,
                cublasGetStatusString(status)),
      "fp8 needs a GPU of compute capability 8.9 (rowwise: 9.0) and CUDA 12.9 or newer; use "
      "precision bf16 elsewhere.");
}

// Descriptions that are destroyed at the end of a call.
template <typename T, cublasStatus_t (*destroy)(T)>
struct Described {
  T value = nullptr;
  Described() = default;
  Described(const Described&) = delete;
  Described& operator=(const Described&) = delete;
  ~Described() {
    if (value) destroy(value);
  }
};
using Operation = Described<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Described<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Described<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

cudaDataType_t type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat8_e4m3fn:
      return CUDA_R_8F_E4M3;
    case at::kFloat8_e5m2:
      return CUDA_R_8F_E5M2;
    case at::kBFloat16:
      return CUDA_R_16BF;
    case at::kHalf:
      return CUDA_R_16F;
    default:
      return CUDA_R_32F;
  }
}

uint32_t alignment_of(const Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  uint32_t alignment = 256;
  while (address % alignment != 0) alignment /= 2;
  return alignment;
}

// All that the choice of an algorithm depends on.
using Key = std::array<int64_t, 17>;

struct Algorithms {
  Mutex mutex;
  std::map<Key, cublasLtMatmulAlgo_t> known FSDP_GUARDED_BY(mutex);
};

Algorithms& algorithms() {
  static Algorithms all;
  return all;
}

struct Call {
  Tensor out, a, a_factors, b, b_factors, bias;  // the bias may be undefined
  bool accumulate = false, fast = false;
  fp8::Product size;

  bool rowwise() const { return a_factors.numel() > 1; }
  Key key() const {
    return {out.device().index(),
            size.m,
            size.n,
            size.k,
            a.stride(0),
            b.stride(0),
            out.stride(0),
            type_of(a),
            type_of(b),
            type_of(out),
            alignment_of(a),
            alignment_of(b),
            alignment_of(out),
            bias.defined() ? alignment_of(bias) : 0,
            accumulate,
            fast,
            rowwise()};
  }
};

// cuBLASLt's matrices are column-major: our out is its transposed result, b its first operand.
void describe_operation(Operation& operation, const Call& call) {
  check(cublasLtMatmulDescCreate(&operation.value, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        "describe a product", call.size);
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    check(cublasLtMatmulDescSetAttribute(operation.value, attribute, &value, sizeof(value)),
          "describe a product", call.size);
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(call.fast));
  set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, call.b_factors.const_data_ptr());
  set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, call.a_factors.const_data_ptr());
  if (call.rowwise()) {
#if CUBLAS_VERSION >= 120900
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
#else
    check(CUBLAS_STATUS_NOT_SUPPORTED, "multiply rowwise scaled matrices", call.size);
#endif
  }
  if (!call.bias.defined()) return;
  set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
  set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(call.bias));
  set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, call.bias.const_data_ptr());
}

void describe_matrix(Layout& layout, const Tensor& tensor, const Call& call) {
  check(cublasLtMatrixLayoutCreate(&layout.value, type_of(tensor),
                                   static_cast<uint64_t>(tensor.size(1)),
                                   static_cast<uint64_t>(tensor.size(0)), tensor.stride(0)),
        "describe a matrix", call.size);
}

cublasLtMatmulAlgo_t chosen(cublasLtHandle_t handle, const Call& call, const Operation& operation,
                            const Layout& a, const Layout& b, const Layout& out) {
  Algorithms& all = algorithms();
  const Key key = call.key();
  const Lock lock(all.mutex);
  const auto place = all.known.find(key);
  if (place != all.known.end()) return place->second;
  Preference preference;
  check(cublasLtMatmulPreferenceCreate(&preference.value), "choose an algorithm for a product",
        call.size);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check(cublasLtMatmulPreferenceSetAttribute(preference.value, attribute, &value, sizeof(value)),
          "choose an algorithm for a product", call.size);
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspace);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(call.b));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(call.a));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(call.out));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(call.out));
  cublasLtMatmulHeuristicResult_t found = {};
  int count = 0;
  const auto status =
      cublasLtMatmulAlgoGetHeuristic(handle, operation.value, b.value, a.value, out.value,
                                     out.value, preference.value, 1, &found, &count);
  check(status == CUBLAS_STATUS_SUCCESS && count == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : status,
        "find an algorithm for a product", call.size);
  return all.known.emplace(key, found.algo).first->second;
}

void multiply(const Call& call) {
  const c10::cuda::CUDAGuard guard(call.out.device());
  cublasLtHandle_t handle = at::cuda::getCurrentCUDABlasLtHandle();
  Operation operation;
  describe_operation(operation, call);
  Layout a, b, out;
  describe_matrix(a, call.a, call);
  describe_matrix(b, call.b, call);
  describe_matrix(out, call.out, call);
  const cublasLtMatmulAlgo_t algorithm = chosen(handle, call, operation, a, b, out);
  const Tensor workspace =
      at::empty({static_cast<int64_t>(kWorkspace)}, call.out.options().dtype(at::kByte));
  const float one = 1, add = call.accumulate ? 1 : 0;
  void* to = call.out.mutable_data_ptr();
  check(cublasLtMatmul(handle, operation.value, &one, call.b.const_data_ptr(), b.value,
                       call.a.const_data_ptr(), a.value, &add, to, out.value, to, out.value,
                       &algorithm, workspace.mutable_data_ptr(), kWorkspace,
                       at::cuda::getCurrentCUDAStream().stream()),
        "compute a product", call.size);
}

Tensor fp8_mm(const Tensor& a, const Tensor& a_factors, const Tensor& b, const Tensor& b_factors,
              const Optional& bias, at::ScalarType type, bool fast) {
  Tensor out = at::empty({a.size(0), b.size(0)}, a.options().dtype(type));
  const fp8::Product size = fp8::check_product(out, a, a_factors, b, b_factors, bias);
  const bool later = bias && bias->defined() && type == at::kFloat;  // cuBLASLt takes 16 bits only
  multiply({.out = out,
            .a = a,
            .a_factors = a_factors,
            .b = b,
            .b_factors = b_factors,
            .bias = later || !bias ? Tensor() : *bias,
            .fast = fast,
            .size = size});
  if (later) out.add_(*bias);
  return out;
}

void fp8_mm_into(const Tensor& out, const Tensor& a, const Tensor& a_factors, const Tensor& b,
                 const Tensor& b_factors, bool accumulate) {
  const fp8::Product size = fp8::check_product(out, a, a_factors, b, b_factors, {});
  multiply({.out = out,
            .a = a,
            .a_factors = a_factors,
            .b = b,
            .b_factors = b_factors,
            .accumulate = accumulate,
            .size = size});
}

}  // namespace

TORCH_LIBRARY_IMPL(fsdp, CUDA, m) {
  m.impl("fp8_mm", fp8_mm);
  m.impl("fp8_mm_into", fp8_mm_into);
}

}  // namespace fsdp::kernels
