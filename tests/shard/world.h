// The world that the ranks of a test binary share.
//
// Every rank is a process that runs the same tests in the same order, started by `fsdp run` or
// mpirun (main is in world.cpp). A rank that leaves a test early (ASSERT, an exception) would leave
// the others waiting for it: it ends itself, and with it the run, unless they left as well.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "fsdp/mesh.h"
#include "fsdp/world.h"

namespace fsdp::testing {

const World& test_world();
inline int rank() {
  return test_world().rank();
}
inline int world_size() {
  return test_world().size();
}
at::Device test_device();  // a GPU with nccl, else the CPU

// replicate = 2 × shard = W / 2; made once. W must be even.
const DeviceMesh& hybrid_mesh();

// Collective: whether it is so on every rank, and on any.
bool on_every_rank(bool mine);
bool on_any_rank(bool mine);
double sum_over_ranks(double mine);
// Collective: rank 0's text.
std::string text_of_rank_0(const std::string& mine);

// What `act` throws, or "" (and a failure of the test) if it throws nothing.
std::string error_of(const std::function<void()>& act);
// `act` throws, and the message has each of `words` (whatever their case) and, unless it is empty,
// one of `one_of`.
void expect_error(const std::function<void()>& act, const std::vector<std::string>& words,
                  const std::vector<std::string>& one_of = {});
bool contains(const std::string& text, const std::string& word);  // whatever the case

}  // namespace fsdp::testing
