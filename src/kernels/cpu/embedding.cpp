// An embedding's gradient on the CPU. Rows with the same id are chained in order, and one thread
// adds up each chain: the same bits for any number of threads, without sorting.
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/format.h"
#include "kernels/checks.h"
#include "kernels/cpu/dtypes.h"
#include "kernels/cpu/lane_math.h"
#include "kernels/cpu/parallel.h"

namespace fsdp::kernels::cpu {
namespace {

using at::Tensor;

constexpr int64_t kNone = -1;

struct Chains {
  std::vector<int64_t> first;  // by id: its first row, or kNone
  std::vector<int64_t> next;   // by row: the next row with its id, or kNone
  std::vector<int64_t> ids;    // ids that have rows
};

Chains chain(const int64_t* ids, int64_t rows, int64_t vocab, int64_t padding_idx) {
  Chains chains{std::vector<int64_t>(vocab, kNone), std::vector<int64_t>(rows), {}};
  chains.ids.reserve(std::min(rows, vocab));
  for (int64_t row = rows - 1; row >= 0; --row) {
    const int64_t id = ids[row];
    if (id < 0 || id >= vocab)
      throw Error(
          formatted("embedding_backward: ids[{}] is {}, expected 0 to {}.", row, id, vocab - 1),
          "every id must be a row of grad_weight [vocab, dim].");
    if (padding_idx >= 0 && id == padding_idx) continue;
    if (chains.first[id] == kNone) chains.ids.push_back(id);
    chains.next[row] = chains.first[id];
    chains.first[id] = row;
  }
  return chains;
}

// target = the sum of a chain's rows, added to the old value if `accumulate`.
template <typename T, typename G>
void add_chain(const Chains& chains, int64_t id, const T* grad, int64_t dim, G* target,
               bool accumulate) {
  using C = std::conditional_t<std::is_same_v<G, double>, double, Compute<T>>;
  constexpr int64_t kColumns = 512;
  const auto copy = [](auto* to, const auto* from) { store<C>(to, load<C>(from)); };
  const auto add = [](C* sum, const T* from) { store<C>(sum, load<C>(sum) + load<C>(from)); };
  const int64_t first = chains.first[id];
  if (!accumulate && chains.next[first] == kNone)
    return over<C>(dim, copy, target, grad + first * dim);
  for (int64_t begin = 0; begin < dim; begin += kColumns) {
    const int64_t columns = std::min(kColumns, dim - begin);
    C sum[kColumns];
    int64_t row = first;
    if (accumulate) {
      over<C>(columns, copy, sum, static_cast<const G*>(target + begin));
    } else {
      over<C>(columns, copy, sum, grad + row * dim + begin);
      row = chains.next[row];
    }
    for (; row != kNone; row = chains.next[row])
      over<C>(columns, add, sum, grad + row * dim + begin);
    over<C>(columns, copy, target + begin, static_cast<const C*>(sum));
  }
}

void embedding_backward(const Tensor& grad, const Tensor& ids, const Tensor& grad_weight,
                        int64_t padding_idx, bool accumulate) {
  const auto [rows, dim] =
      check_embedding_backward(grad, ids, grad_weight, padding_idx, accumulate);
  const int64_t vocab = grad_weight.size(0);
  const Chains chains = chain(read<int64_t>(ids), rows, vocab, padding_idx);
  with_dtype(grad_weight.scalar_type(), [&, dim = dim]<typename G>(G) {
    G* target = write<G>(grad_weight);
    if (!accumulate)
      parallel_rows(vocab, dim, [&](int64_t begin, int64_t end) {
        for (int64_t id = begin; id < end; ++id)
          if (chains.first[id] == kNone)
            std::fill(target + id * dim, target + (id + 1) * dim, G(0));
      });
    with_dtype(grad.scalar_type(), [&]<typename T>(T) {
      parallel_rows(static_cast<int64_t>(chains.ids.size()), dim, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          add_chain(chains, chains.ids[i], read<T>(grad), dim, target + chains.ids[i] * dim,
                    accumulate);
      });
    });
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(fsdp, CPU, m) {
  m.impl("embedding_backward", embedding_backward);
}

}  // namespace fsdp::kernels::cpu
