// What code in a region may do to tensors. Each piece runs plainly, fully recomputed, recomputed
// except for its matrix products, and offloaded.
#include <ATen/ATen.h>
#include <torch/autograd.h>
#include <torch/library.h>
#include <torch/nn/module.h>

#include <thread>

#include "memory/side_by_side.h"
#include "shard/tape_hook.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kRows = 64, kWidth = 8;

struct WeightImpl : torch::nn::Module {
  WeightImpl() : value(register_parameter("value", 0.3 * at::randn({kWidth, kWidth}))) {}
  at::Tensor value;
};
TORCH_MODULE(Weight);

// Three regions: "a", "b" and "c" each start where their weight is used.
struct NetImpl : torch::nn::Module {
  at::Tensor a() { return first->value; }
  at::Tensor b() { return second->value; }
  at::Tensor c() { return third->value; }
  Weight first = register_module("a", Weight());
  Weight second = register_module("b", Weight());
  Weight third = register_module("c", Weight());
  at::Tensor count = register_buffer("count", at::zeros({kRows, kWidth}));
  at::Tensor x = register_buffer("x", at::randn({kRows, kWidth}));
};
TORCH_MODULE(Net);

using Piece = std::function<at::Tensor(NetImpl& net, at::Tensor h)>;

// loss = f(x · a) · c, where f is the piece, all of it in region "a".
Make with(const Piece& piece) {
  return [piece](Recompute mode) {
    Net net;
    auto loss = [net, piece]() mutable {
      at::Tensor h = piece(*net, net->x.mm(net->a()));
      return h.mm(net->c()).tanh().square().sum();
    };
    return Subject{net.ptr(), loss, RecomputePolicy(wrap::names({"a", "b", "c"}), {.mode = mode})};
  };
}

at::Tensor long_way(at::Tensor h) {  // keeps several tensors
  return h.tanh().exp().sigmoid().sin();
}

struct NamedPiece {
  const char* name;
  Piece run;
  bool copies = false;  // keeps constants or buffers that a plain run doesn't
};

void PrintTo(const NamedPiece& piece, std::ostream* out) {
  *out << piece.name;
}

class Pieces : public ::testing::TestWithParam<NamedPiece> {};

TEST_P(Pieces, AreTheSame) {
  expect_same(with(GetParam().run), {.less = !GetParam().copies});
}

TEST_P(Pieces, AreTheSameForSeveralForwardsBeforeABackward) {
  expect_same(with(GetParam().run), {.forwards = 3, .less = !GetParam().copies});
}

TEST_P(Pieces, AreTheSameInASecondBackwardOfTheGraph) {
  expect_same(with(GetParam().run), {.retain = true, .less = !GetParam().copies});
}

const std::vector<NamedPiece> kPieces = {
    {"elementwise", [](NetImpl&, at::Tensor h) { return long_way(h); }},
    {"dropout", [](NetImpl&, at::Tensor h) { return at::dropout(long_way(h), 0.3, true).tanh(); }},
    {"random_numbers",
     [](NetImpl&, at::Tensor h) {
       h = (h.tanh() * at::rand_like(h)).exp();
       h = (h + at::randn({kRows, kWidth})).sigmoid() * at::bernoulli(h.detach().sigmoid());
       return h.tanh();
     }},
    {"own_generator",
     [](NetImpl&, at::Tensor h) {
       auto generator = at::detail::createCPUGenerator(5);
       return long_way(h * at::bernoulli(h.detach().sigmoid(), generator));
     }},
    {"cat_and_stack",
     [](NetImpl&, at::Tensor h) {
       at::Tensor both = at::cat({h.tanh(), h.exp()}, 1).sigmoid();
       return at::stack({both, both * 2}).tanh().sum(0).narrow(1, 3, kWidth).exp();
     }},
    {"several_outputs",
     [](NetImpl&, at::Tensor h) {
       auto parts = h.tanh().chunk(2, 1);
       auto rows = parts[1].exp().unbind(0);
       auto [values, places] = h.exp().max(1, true);
       auto [sorted, order] = h.sort(1);
       return at::cat({parts[0].sigmoid(), parts[1].sin() * rows[3].exp()}, 1) * values + sorted;
     }},
    {"undefined_outputs",
     [](NetImpl&, at::Tensor h) {
       return std::get<0>(at::native_layer_norm(h.tanh(), {kWidth}, {}, {}, 1e-5)).exp();
     }},
    {"views",
     [](NetImpl&, at::Tensor h) {
       at::Tensor t = h.tanh().t().exp();
       return t.view({2, kWidth / 2, kRows}).permute({2, 0, 1}).reshape({kRows, kWidth}).sin();
     }},
    {"expanded",
     [](NetImpl&, at::Tensor h) {
       return (h.mean(1, true).tanh().expand({kRows, kWidth}) * h.tanh()).exp();
     }},
    {"in_place",
     [](NetImpl&, at::Tensor h) {
       at::Tensor y = h * 2;
       y.relu_();
       at::Tensor z = (y.exp() + h).mul_(0.5).add_(h);
       return (z * 3).sigmoid_() * y;
     }},
    {"in_place_on_a_product",  // which selective keeps
     [](NetImpl&, at::Tensor h) { return long_way(h.add_(1).mul_(0.7)); }},
    {"in_place_on_a_product_that_was_read",
     [](NetImpl&, at::Tensor h) {
       at::Tensor z = (h * 2).exp().tanh();
       h.add_(1);
       return z * h.sigmoid();
     }},
    {"in_place_through_a_view",
     [](NetImpl&, at::Tensor h) {
       at::Tensor y = h * 1;
       y.narrow(1, 0, 3).mul_(3);
       y.view({-1}).narrow(0, 5, 20).add_(1);
       return long_way(y);
     }},
    {"in_place_on_unsafe_chunks",  // as LSTM cells do: one storage, several version counters
     [](NetImpl&, at::Tensor h) {
       auto parts = (h * 1).unsafe_chunk(4, 1);
       parts[0].sigmoid_();
       parts[1].tanh_();
       parts[2].sigmoid_();
       return (at::cat(parts, 1) * parts[0].repeat({1, 4}) * parts[1].repeat({1, 4})).exp();
     }},
    {"in_place_on_a_list",
     [](NetImpl&, at::Tensor h) {
       std::vector<at::Tensor> both{h * 1, h * 2};
       at::_foreach_add_(both, 1.0);
       return both[0].exp() * both[1].sigmoid();
     }},
    {"shape_in_place",
     [](NetImpl&, at::Tensor h) {
       at::Tensor y = h * 3;
       y.t_();
       return y.tanh().t().exp();
     }},
    {"out_argument",
     [](NetImpl&, at::Tensor h) {
       at::Tensor scale = at::empty({kRows, kWidth});
       {
         torch::NoGradGuard no_grad;
         at::exp_out(scale, h);
         at::Tensor half = scale.narrow(1, 0, 4);
         at::sin_out(half, h.narrow(1, 0, 4));
       }
       return long_way(h * scale);
     }},
    {"filled_by_hand",
     [](NetImpl&, at::Tensor h) {
       at::Tensor mask = at::empty({kRows, kWidth}), other = at::zeros({kRows, kWidth});
       for (int64_t i = 0; i < mask.numel(); ++i) mask.data_ptr<float>()[i] = 0.01f * i;
       for (int64_t i = 0; i < 20; ++i) other.data_ptr<float>()[i] = 1;
       at::Tensor constant = at::tensor({0.5, 1.5}).to(at::kFloat);
       return long_way(h * mask + other * constant[1]);
     }},
    {"borrowed_memory",
     [](NetImpl&, at::Tensor h) {
       std::vector<float> values(kRows * kWidth, 0.5f);
       at::Tensor y = h + at::from_blob(values.data(), {kRows, kWidth});
       y = long_way(y);
       std::fill(values.begin(), values.end(), 7.f);
       return y;
     }},
    {"index",
     [](NetImpl&, at::Tensor h) {
       at::Tensor order = h.argsort(static_cast<int64_t>(1));
       at::Tensor g = h.tanh().gather(1, order).exp();
       at::Tensor rows = at::randperm(kRows).narrow(0, 0, 10);
       at::Tensor z = at::zeros({kRows, kWidth});
       z.index_put_({rows}, g.index({rows}).sigmoid());
       z.masked_fill_(z > 0.6, 0.1);
       return (z.tanh() + h).exp();
     },
     /*copies=*/true},
    {"no_grad_part",
     [](NetImpl&, at::Tensor h) {
       at::Tensor y = h.tanh(), scale;
       {
         torch::NoGradGuard no_grad;
         scale = y.abs().amax().clamp_min(1e-3);
       }
       return (y / scale).exp().tanh();
     }},
    {"detached_part",
     [](NetImpl&, at::Tensor h) { return (h.detach().exp() * h.sigmoid()).tanh(); }},
    {"written_through_data",
     [](NetImpl&, at::Tensor h) {
       at::Tensor y = h * 1;
       y.data().mul_(2);
       return long_way(y);
     }},
    {"reads_a_number",
     [](NetImpl&, at::Tensor h) {
       float most = h.detach().max().item<float>();
       at::Tensor places = (h > 0).nonzero();
       return (h.tanh() * most).exp() + static_cast<double>(places.size(0));
     }},
    {"writes_a_buffer",
     [](NetImpl& net, at::Tensor h) {
       net.count.add_(1);
       return long_way(h + net.count);
     },
     /*copies=*/true},
    {"writes_a_buffer_that_was_read",
     [](NetImpl& net, at::Tensor h) {
       at::Tensor y = (h + net.count).tanh();
       net.count.add_(1);
       return (y.exp() + net.count).sigmoid();
     },
     /*copies=*/true},
    {"in_place_on_what_another_region_made",
     [](NetImpl& net, at::Tensor h) {
       at::Tensor y = h.tanh() * 2, z = y.exp();  // exp saves z
       at::Tensor shift = net.b().sum();          // region "b" starts
       y.add_(shift);
       return z.sin() * y.exp();
     },
     /*copies=*/true},
    {"loss_inside", [](NetImpl&, at::Tensor h) { return at::log_softmax(h.exp(), 1).exp(); }},
    {"another_module",
     [](NetImpl& net, at::Tensor h) { return long_way(long_way(h).mm(net.b()) + h); }},
    {"a_weight_used_again",
     [](NetImpl& net, at::Tensor h) { return long_way(long_way(h).mm(net.a()) + h); }},
    {"sparse",
     [](NetImpl&, at::Tensor h) {
       at::Tensor sparse = at::eye(kRows).to_sparse();
       return long_way(at::mm(sparse, h.tanh()));
     },
     /*copies=*/true},
    {"complex",
     [](NetImpl&, at::Tensor h) {
       at::Tensor z = at::complex(h.tanh(), h.sin());
       return at::real(z.conj() * z.exp()).sin();
     }},
    {"custom_function",
     [](NetImpl&, at::Tensor h) {
       struct Cube : torch::autograd::Function<Cube> {
         static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x) {
           at::Tensor square = x * x, result = square * x;
           context->save_for_backward({square, result});
           return result;
         }
         static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                        torch::autograd::variable_list grads) {
           return {grads[0] * 3 * context->get_saved_variables()[0]};
         }
       };
       return Cube::apply(h.tanh()).exp();
     }},
};

INSTANTIATE_TEST_SUITE_P(Table, Pieces, ::testing::ValuesIn(kPieces),
                         [](const auto& info) { return std::string(info.param.name); });

// --- what must fail or be kept ---

// Expects that both the plain and the recomputed run fail with `word`.
void expect_both_fail(const Piece& piece, const std::string& word) {
  Outcome plain = run(with(piece), {.recompute = false, .steps = 1});
  Outcome again = run(with(piece), {.steps = 1});
  EXPECT_NE(plain.error.find(word), std::string::npos) << plain.error;
  EXPECT_NE(again.error.find(word), std::string::npos) << again.error;
}

TEST(Regions, ASavedTensorThatIsChangedInPlaceIsAnErrorAsInAPlainRun) {
  expect_both_fail(
      [](NetImpl&, at::Tensor h) {
        at::Tensor y = h.exp();
        y.add_(1);
        return y;
      },
      "changed in place");
}

TEST(Regions, AnInputThatIsChangedBetweenForwardAndBackwardIsAnError) {
  Net net;
  apply_activation_checkpointing(net, wrap::names({"a", "c"}));
  at::Tensor shift = at::ones({kRows, kWidth});
  at::Tensor loss = long_way(net->x.mm(net->a()) + shift).mm(net->c()).sum();
  std::thread([&] { shift.add_(1); }).join();  // in a thread that doesn't record
  try {
    loss.backward();
    FAIL() << "no error";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("changed in place"), std::string::npos);
  }
}

at::Tensor with_a_secret(at::Tensor x) {
  x.add_(1);
  return x * 2;
}
TORCH_LIBRARY(recompute_test, m) {
  // Its schema doesn't declare the write.
  m.def("secret", torch::dispatch(c10::DispatchKey::CPU, &with_a_secret));
}

TEST(Regions, OneWithAnOperatorOfUnknownEffectsIsKept) {
  auto piece = [](NetImpl&, at::Tensor h) {
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("recompute_test::secret", "")
                         .typed<at::Tensor(at::Tensor)>();
    at::Tensor y = h.tanh().exp(), z;
    {
      torch::NoGradGuard no_grad;
      z = op.call(h.detach().clone());
    }
    return long_way(y * z);
  };
  ::testing::internal::CaptureStderr();
  expect_same(with(piece));
  std::string said = ::testing::internal::GetCapturedStderr();
  size_t at = said.find("recompute_test::secret");
  ASSERT_NE(at, std::string::npos) << said;
  EXPECT_EQ(said.find("recompute_test::secret", at + 1), std::string::npos) << "said twice";
}

TEST(Regions, AnExceptionInForwardLeavesNothingBehind) {
  auto make = [](bool fails) {
    return with([fails, calls = std::make_shared<int>(0)](NetImpl& net, at::Tensor h) {
      h = long_way(h);
      if (fails && ++*calls == 1) {
        try {
          at::Tensor lost = long_way(h.mm(net.b()));
          lost.mm(at::ones({3, 3}));  // throws: the sizes don't match
        } catch (const c10::Error&) {
        }
        throw std::runtime_error("in the middle of forward");
      }
      return h;
    });
  };
  Outcome plain = run(make(false), {.recompute = false, .steps = 1});
  bool failed = false;
  Outcome again = run(
      [&](Recompute mode) {
        Subject subject = make(true)(mode);
        auto loss = subject.loss;
        subject.loss = [loss, &failed]() {
          try {
            return loss();
          } catch (const std::runtime_error&) {
            failed = true;
            at::Tensor unrelated = at::ones({4}).exp();  // in no region
            return loss();
          }
        };
        return subject;
      },
      {.steps = 1});
  EXPECT_TRUE(failed);
  expect_equal(plain, again);
}

TEST(Regions, AForwardWithoutBackwardIsForgotten) {
  auto make = with([](NetImpl&, at::Tensor h) { return long_way(h); });
  Outcome plain = run(make, {.recompute = false});
  Outcome again = run(
      [&](Recompute mode) {
        Subject subject = make(mode);
        auto loss = subject.loss;
        subject.loss = [loss] {
          loss();  // dropped
          return loss();
        };
        return subject;
      },
      {});
  expect_equal(plain, again);
}

TEST(Regions, RandomNumbersOfAGraphedStepAreKept) {
  Make make = with([](NetImpl&, at::Tensor h) {
    h = at::dropout(h.tanh(), 0.3, true).exp();
    at::Tensor mask = at::empty_like(h).bernoulli_(0.5);
    return (h * mask).sigmoid();
  });
  auto recorded = [&](Recompute mode) {
    Subject subject = make(mode);
    subject.loss = [loss = subject.loss] {
      shard::InGraph in_graph;
      return loss();
    };
    return subject;
  };
  Outcome plain = run(make, {.recompute = false});
  for (Recompute mode : {Recompute::FULL, Recompute::SELECTIVE}) {
    Outcome again = run(recorded, {.mode = mode});
    expect_equal(plain, again);
    EXPECT_LT(again.kept, plain.kept);
    // Each of the two draws keeps its mask or its result.
    EXPECT_GE(again.kept, run(make, {.mode = mode}).kept + 2 * kRows * kWidth);
  }
}

TEST(Regions, ASecondDerivativeIsTheSame) {
  expect_same([](Recompute mode) {
    Net net;
    auto loss = [net]() mutable {
      at::Tensor x = net->x.clone().requires_grad_(true);
      at::Tensor y = long_way(x.mm(net->a())).mm(net->c()).tanh().sum();
      at::Tensor gradient = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
      return y + gradient.square().sum();
    };
    return Subject{net.ptr(), loss, RecomputePolicy(wrap::names({"a", "c"}), {.mode = mode})};
  });
}

TEST(Regions, NothingIsRecordedWithoutGradMode) {
  Net net;
  apply_activation_checkpointing(net, wrap::names({"a", "c"}));
  torch::NoGradGuard no_grad;
  at::Tensor y = long_way(net->x.mm(net->a()));
  EXPECT_FALSE(shard::taping());
  net->x.mm(net->c());
  EXPECT_FALSE(shard::taping());
}

TEST(Regions, ThreadsHaveTheirOwn) {
  auto make = with([](NetImpl&, at::Tensor h) { return long_way(h); });
  Outcome plain = run(make, {.recompute = false, .steps = 1});
  torch::manual_seed(1);
  Subject shared = make(Recompute::FULL);
  apply_activation_checkpointing(shared.module, shared.policy);
  std::vector<at::Tensor> losses(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < losses.size(); ++i)
    threads.emplace_back([&, i] { losses[i] = shared.loss(); });
  for (std::thread& thread : threads) thread.join();  // forward's threads are gone
  for (const at::Tensor& loss : losses) {
    shared.module->zero_grad();
    loss.backward();
    EXPECT_TRUE(at::equal(loss, plain.losses[0]));
    auto parameters = shared.module->parameters();
    for (size_t i = 0; i < parameters.size(); ++i)
      if (plain.gradients[i].defined()) {
        EXPECT_TRUE(at::equal(parameters[i].grad(), plain.gradients[i]));
      }
  }
}

}  // namespace
}  // namespace fsdp::testing
