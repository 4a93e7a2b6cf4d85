#include "nn/ring.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>

#include <limits>
#include <string>
#include <tuple>

#include "base/format.h"
#include "fsdp/error.h"
#include "kernels/operators.h"
#include "nn/context_operators.h"
#include "nn/node.h"
#include "nn/partial_attention.h"
#include "nn/ring_pieces.h"

namespace fsdp::nn {
namespace {

// Hands a tensor to the next rank.
class Neighbours {
 public:
  explicit Neighbours(const Communicator& comm) : comm_(comm) {}

  // `out` and `in` must not change before wait(). Collective.
  Work hand_on(const at::Tensor& out, const at::Tensor& in) const {
    const auto size = static_cast<size_t>(comm_.size()), rank = static_cast<size_t>(comm_.rank());
    std::vector<int64_t> from(size), to(size);
    from[(rank + size - 1) % size] = out.size(0);
    to[(rank + 1) % size] = in.size(0);
    return comm_.all_to_all(out, in, from, to, {.async = true, .label = "attention over the ring"});
  }
  static void wait(const Work& arrives) {
    RECORD_USER_SCOPE("comm wait for the ring");
    arrives.wait();
  }
  int64_t rank() const { return comm_.rank(); }
  int64_t size() const { return comm_.size(); }
  // Whose keys and values are here in a step.
  int64_t owner(int64_t step) const { return (rank() - step + size()) % size(); }

 private:
  const Communicator& comm_;
};

at::ScalarType wide_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

std::vector<int32_t> on_host(const std::optional<at::Tensor>& documents) {
  if (!documents) return {};
  const at::Tensor host = documents->cpu().contiguous();
  const auto* starts = host.const_data_ptr<int32_t>();
  return {starts, starts + host.numel()};
}

RingShape shape_of(const at::Tensor& q, const std::optional<at::Tensor>& documents, bool causal,
                   const Neighbours& ring) {
  RingShape shape{.ranks = ring.size(),
                  .batch = q.size(0),
                  .tokens = q.size(2),
                  .causal = causal,
                  .documents = on_host(q.is_meta() ? std::nullopt : documents)};
  const int64_t all = shape.batch * shape.tokens * shape.ranks;
  if (!shape.documents.empty() && (shape.documents.front() != 0 || shape.documents.back() != all))
    throw Error(formatted("documents don't end where the batch does, after {} tokens.", all),
                "with a context, pass the documents of whole sequences.");
  return shape;
}

at::Tensor narrowed(const at::Tensor& x, Span sequences, Span tokens) {
  return x.narrow(0, sequences.first, sequences.count).narrow(2, tokens.first, tokens.count);
}

// Adds the result of some keys to that of others.
void combine(const PartialAttention& all, const PartialAttention& some) {
  const at::Tensor lse = at::logaddexp(all.lse, some.lse);
  all.out.mul_((all.lse - lse).exp().unsqueeze(-1))
      .add_(some.out * (some.lse - lse).exp().unsqueeze(-1));
  all.lse.copy_(lse);
}

// Inputs: q, k, v. Saved: these, the result, its logsumexp, documents.
struct RingNode : Node {
  ChannelPointer channel;
  bool causal = false;
  std::optional<double> scale;

  std::string name() const override { return "fsdp::ring_attention"; }

  Tensors backward(const Tensors& gradients) override {
    const Tensors kept = saved();
    const at::Tensor &q = kept[0], &k = kept[1], &v = kept[2], &out = kept[3], &lse = kept[4];
    const at::Tensor grad = gradients[0].stride(-1) == 1 ? gradients[0] : gradients[0].contiguous();
    const Neighbours ring(channel->comm);
    const RingShape shape =
        shape_of(q, kept.size() > 5 ? std::optional(kept[5]) : std::nullopt, causal, ring);
    at::Tensor of_q = at::zeros_like(q, q.options().dtype(wide_type(q)));
    at::Tensor held = at::cat({k, v}, -1), next;
    const auto none = [&] { return at::zeros_like(held, held.options().dtype(wide_type(q))); };
    at::Tensor passed, arriving;  // gradients of keys and values
    Work gradients_arrive;
    for (int64_t step = 0; step < ring.size(); ++step, held = next) {
      const bool last = step + 1 == ring.size();
      Work arrives;
      if (!last) arrives = ring.hand_on(next = at::empty_like(held), held);
      const at::Tensor own = none();
      for (const Piece& piece : pieces_of(shape, ring.rank(), ring.owner(step))) {
        const auto mine = [&](const at::Tensor& x) {
          return narrowed(x, piece.sequences, piece.queries);
        };
        const at::Tensor keys_values = narrowed(held, piece.sequences, piece.keys);
        const AttentionGradients some =
            partial_attention_backward(mine(grad), mine(q), keys_values.narrow(-1, 0, k.size(3)),
                                       keys_values.narrow(-1, k.size(3), v.size(3)), mine(out),
                                       mine(lse), piece.causal, scale);
        mine(of_q).add_(some.q);
        const at::Tensor theirs = narrowed(own, piece.sequences, piece.keys);
        theirs.narrow(-1, 0, k.size(3)).add_(some.k);
        theirs.narrow(-1, k.size(3), v.size(3)).add_(some.v);
      }
      Neighbours::wait(gradients_arrive);
      if (step > 0) own.add_(arriving);
      passed = own;  // until it has arrived
      gradients_arrive = ring.hand_on(arriving = at::empty_like(own), passed);
      Neighbours::wait(arrives);
    }
    Neighbours::wait(gradients_arrive);
    arriving = arriving.to(q.scalar_type());
    return {of_q.to(q.scalar_type()), arriving.narrow(-1, 0, k.size(3)),
            arriving.narrow(-1, k.size(3), v.size(3))};
  }
};

void check_ring(const at::Tensor& q, const AttentionOptions& options) {
  const auto refuse = [](const std::string& what) {
    throw Error(formatted("attention over a ring can't have {}.", what),
                "exchange heads instead (ContextKind::ULYSSES), or leave it out.");
  };
  if (options.mask.defined()) refuse("a mask or padding");
  if (options.dropout > 0) refuse("dropout");
  if (options.window > 0 && options.window < q.size(2) * options.context.size())
    refuse("a sliding window");
  if (options.documents.defined() && !options.causal) refuse("documents without causal");
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> ring_kernel(const at::Tensor& q, const at::Tensor& k,
                                               const at::Tensor& v,
                                               const std::optional<at::Tensor>& documents,
                                               bool causal, std::optional<double> scale,
                                               const ChannelPointer& channel) {
  const Neighbours ring(channel->comm);
  const RingShape shape = shape_of(q, documents, causal, ring);
  const auto wide = q.options().dtype(wide_type(q));
  // Heads of a token are adjacent, as flash attention's are.
  const PartialAttention all{
      at::zeros({q.size(0), q.size(2), q.size(1), v.size(3)}, wide).transpose(1, 2),
      at::full({q.size(0), q.size(1), q.size(2)}, -std::numeric_limits<double>::infinity(), wide)};
  at::Tensor held = at::cat({k, v}, -1), next;
  for (int64_t step = 0; step < ring.size(); ++step, held = next) {
    const bool last = step + 1 == ring.size();
    Work arrives;
    if (!last) arrives = ring.hand_on(next = at::empty_like(held), held);
    for (const Piece& piece : pieces_of(shape, ring.rank(), ring.owner(step))) {
      const at::Tensor keys_values = narrowed(held, piece.sequences, piece.keys);
      combine({narrowed(all.out, piece.sequences, piece.queries),
               narrowed(all.lse, piece.sequences, piece.queries)},
              partial_attention(narrowed(q, piece.sequences, piece.queries),
                                keys_values.narrow(-1, 0, k.size(3)),
                                keys_values.narrow(-1, k.size(3), v.size(3)), piece.causal, scale));
    }
    Neighbours::wait(arrives);
  }
  return {all.out.to(q.scalar_type()), all.lse};
}

at::Tensor ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttentionOptions& options) {
  check_ring(q, options);
  static const auto op = kernels::find_operator<decltype(ring_kernel)>("fsdp::ring_attention");
  const auto channel = c10::make_intrusive<Channel>(options.context.comm());
  at::Tensor out, lse;
  {
    Unrecorded unrecorded;
    kernels::OperatorCall call(q);
    std::tie(out, lse) = op.call(q, k, v, kernels::if_defined(options.documents), options.causal,
                                 options.scale, channel);
  }
  if (auto node = record<RingNode>({q, k, v})) {
    node->channel = channel;
    node->causal = options.causal;
    node->scale = options.scale;
    Tensors kept = {q, k, v, out.tensor_data(), lse};
    if (options.documents.defined()) kept.push_back(options.documents);
    node->save(kept);
    node->returns(out);
  }
  return out;
}

}  // namespace fsdp::nn
