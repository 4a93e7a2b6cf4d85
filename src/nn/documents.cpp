#include "nn/documents.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <string>
#include <vector>

#include "base/format.h"
#include "fsdp/error.h"
#include "nn/flash.h"

namespace fsdp::nn {
namespace {

[[noreturn]] void refuse_documents(const std::string& what) {
  throw Error(formatted("documents of a batch {}.", what),
              "pass where each begins in the flattened batch, and its end: int32 [documents + 1], "
              "0 first, not decreasing; a document lies in one sequence.");
}

// The lengths of the documents of each sequence. Reads the tensor on the host.
std::vector<std::vector<int64_t>> lengths_of(const at::Tensor& documents, int64_t batch,
                                             int64_t tokens) {
  const at::Tensor host = documents.cpu().contiguous();
  const int32_t* starts = host.const_data_ptr<int32_t>();
  const int64_t count = host.numel() - 1;
  if (count < 0 || starts[0] != 0 || starts[count] != batch * tokens)
    refuse_documents(
        formatted("of {} sequences of {} tokens don't end where the batch does", batch, tokens));
  std::vector<std::vector<int64_t>> lengths(static_cast<size_t>(batch));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = starts[i], length = starts[i + 1] - first;
    if (length == 0) continue;
    if (length < 0 || first % tokens + length > tokens)
      refuse_documents(
          formatted("have a document {} of {} tokens from token {} on, but sequences "
                    "have {}",
                    i, length, first, tokens));
    lengths[static_cast<size_t>(first / tokens)].push_back(length);
  }
  return lengths;
}

at::Tensor one_by_one(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const AttentionOptions& options) {
  AttentionOptions alone = options;
  alone.documents.reset();
  const auto lengths = lengths_of(options.documents, q.size(0), q.size(2));
  // Splits and concatenations, because backward of a slice would fill the whole for each document.
  const auto queries = q.unbind(), keys = k.unbind(), values = v.unbind();
  std::vector<at::Tensor> sequences;
  for (size_t row = 0; row < queries.size(); ++row) {
    auto split = [&](const at::Tensor& x) { return x.split_with_sizes(lengths[row], 1); };
    const auto qs = split(queries[row]), ks = split(keys[row]), vs = split(values[row]);
    std::vector<at::Tensor> outs;
    for (size_t i = 0; i < qs.size(); ++i)
      outs.push_back(attention(qs[i].unsqueeze(0), ks[i].unsqueeze(0), vs[i].unsqueeze(0), alone)
                         .squeeze(0)
                         .transpose(0, 1));
    sequences.push_back(at::cat(outs));
  }
  return at::stack(sequences).transpose(1, 2);  // heads of a token adjacent, as flash attention's
}

// A plan needn't know the documents; their scores aren't held, whoever computes them.
at::Tensor planned(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const AttentionOptions& options) {
  AttentionOptions alone = options;
  alone.documents.reset();
  return attention(q, k, v, alone);
}

}  // namespace

at::Tensor document_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const AttentionOptions& options) {
  if (options.mask.defined() || !options.causal)
    throw Error("attention within documents is causal and takes no mask.",
                "set causal, and make padding a document of its own.");
  if (options.documents.dim() != 1 || options.documents.scalar_type() != at::kInt)
    refuse_documents("aren't an int32 [documents + 1] tensor");
  AttentionOptions chosen = options;
  if (chosen.window >= k.size(2)) chosen.window = 0;
  std::string problem;
  if (at::Tensor out = flash_attention(q, k, v, chosen, problem); out.defined()) return out;
  if (q.is_meta()) return planned(q, k, v, chosen);
  at::Tensor out = one_by_one(q, k, v, chosen);
  give_up_flash(problem);
  return out;
}

}  // namespace fsdp::nn
