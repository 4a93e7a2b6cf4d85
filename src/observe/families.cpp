#include "observe/families.h"

#include <algorithm>
#include <cctype>
#include <string>

namespace fsdp::observe {
namespace {

struct Known {
  std::string_view part;  // of the name, in lower case
  Family family;
};

// The first part that is found decides, so special names come before general ones. Names are of
// NCCL, cuBLAS, cuDNN, CUTLASS, LibTorch and src/kernels.
constexpr Known kKnown[] = {
    {"nccl", Family::kCommunication},
    {"c10d::", Family::kCommunication},
    {"record_param_comms", Family::kCommunication},

    {"cross_entropy", Family::kLoss},
    {"crossentropy", Family::kLoss},
    {"nll_loss", Family::kLoss},
    {"log_softmax", Family::kLoss},
    {"logsoftmax", Family::kLoss},
    {"mse_loss", Family::kLoss},
    {"_loss", Family::kLoss},

    {"flash", Family::kAttention},
    {"fmha", Family::kAttention},
    {"sdpa", Family::kAttention},
    {"scaled_dot_product", Family::kAttention},
    {"_fused_sdp", Family::kAttention},
    {"attention", Family::kAttention},
    {"softmax", Family::kAttention},

    {"adam", Family::kOptimizer},
    {"multi_tensor", Family::kOptimizer},
    {"_foreach_", Family::kOptimizer},
    {"_fused_", Family::kOptimizer},
    {"(update)", Family::kOptimizer},
    {"::update<", Family::kOptimizer},
    {"split_all", Family::kOptimizer},
    {"join_all", Family::kOptimizer},
    {"advance_counts", Family::kOptimizer},
    {"sum_chunks", Family::kOptimizer},  // the gradient norm
    {"normresult", Family::kOptimizer},  // likewise
    {"lpnorm", Family::kOptimizer},

    {"fp8_mm", Family::kProducts},
    {"grouped_mm", Family::kProducts},
    {"fp8_rms_norm", Family::kNorms},
    {"fp8_", Family::kElementwise},
    {"cast_kernel", Family::kElementwise},  // to fp8
    {"amax_kernel", Family::kElementwise},

    {"gemm", Family::kProducts},
    {"nvjet", Family::kProducts},
    {"cutlass", Family::kProducts},
    {"xmma", Family::kProducts},
    {"cublas", Family::kProducts},
    {"splitk", Family::kProducts},
    {"gemv", Family::kProducts},
    {"convol", Family::kProducts},
    {"conv1d", Family::kProducts},
    {"conv2d", Family::kProducts},
    {"fprop", Family::kProducts},
    {"wgrad", Family::kProducts},
    {"dgrad", Family::kProducts},
    {"aten::mm", Family::kProducts},
    {"aten::addmm", Family::kProducts},
    {"aten::bmm", Family::kProducts},
    {"aten::baddbmm", Family::kProducts},
    {"aten::linear", Family::kProducts},
    {"aten::matmul", Family::kProducts},
    {"aten::addmv", Family::kProducts},
    {"aten::mv", Family::kProducts},
    {"aten::dot", Family::kProducts},
    {"mkldnn", Family::kProducts},

    {"layer_norm", Family::kNorms},
    {"layernorm", Family::kNorms},
    {"rms_norm", Family::kNorms},
    {"rmsnorm", Family::kNorms},
    {"batch_norm", Family::kNorms},
    {"batchnorm", Family::kNorms},
    {"group_norm", Family::kNorms},
    {"normforward", Family::kNorms},
    {"normbackward", Family::kNorms},
    {"gammabetabackward", Family::kNorms},

    {"memcpy", Family::kCopies},
    {"memset", Family::kCopies},
    {"aten::copy_", Family::kCopies},
    {"aten::_to_copy", Family::kCopies},
    {"aten::cat", Family::kCopies},
    {"aten::clone", Family::kCopies},
    {"aten::contiguous", Family::kCopies},
    {"aten::zero_", Family::kCopies},
    {"aten::fill_", Family::kCopies},
    {"copy_kernel", Family::kCopies},
    {"catarray", Family::kCopies},
    {"fillfunctor", Family::kCopies},

    {"elementwise", Family::kElementwise},
    {"functor", Family::kElementwise},
    {"reduce_kernel", Family::kElementwise},
    {"embedding", Family::kElementwise},
    {"index", Family::kElementwise},
    {"gather_kernel", Family::kElementwise},
    {"scatter", Family::kElementwise},
    {"swiglu", Family::kElementwise},
    {"gelu", Family::kElementwise},
    {"silu", Family::kElementwise},
    {"relu", Family::kElementwise},
    {"sigmoid", Family::kElementwise},
    {"tanh", Family::kElementwise},
    {"rope", Family::kElementwise},
    {"scale_kernel", Family::kElementwise},
    {"scale_into", Family::kElementwise},
    {"dropout", Family::kElementwise},
    {"aten::add", Family::kElementwise},
    {"aten::sub", Family::kElementwise},
    {"aten::mul", Family::kElementwise},
    {"aten::div", Family::kElementwise},
    {"aten::neg", Family::kElementwise},
    {"aten::pow", Family::kElementwise},
    {"aten::exp", Family::kElementwise},
    {"aten::log", Family::kElementwise},
    {"aten::sqrt", Family::kElementwise},
    {"aten::rsqrt", Family::kElementwise},
    {"aten::sum", Family::kElementwise},
    {"aten::mean", Family::kElementwise},
    {"aten::where", Family::kElementwise},
    {"aten::masked", Family::kElementwise},
    {"aten::sin", Family::kElementwise},
    {"aten::cos", Family::kElementwise},
    {"aten::clamp", Family::kElementwise},
    {"aten::isfinite", Family::kElementwise},
    {"aten::bitwise", Family::kElementwise},
    {"aten::logical", Family::kElementwise},
};

}  // namespace

const char* family_name(Family family) {
  constexpr const char* kNames[kFamilies] = {
      "products",  "attention", "norms", "element-wise",  "loss",
      "optimizer", "copies",    "other", "communication", "waiting for data"};
  return kNames[static_cast<size_t>(family)];
}

Family family_of(std::string_view name) {
  std::string lower(name);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const Known& known : kKnown)
    if (lower.find(known.part) != std::string::npos) return known.family;
  return Family::kOther;
}

}  // namespace fsdp::observe
