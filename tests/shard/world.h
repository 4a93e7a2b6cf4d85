// The world that the ranks of a test binary share.
//
// Every rank is a process that runs the same tests in the same order, started by `fsdp run` or
// mpirun (main is in world.cpp). A rank that leaves a test early (ASSERT, an exception) would keep
// the others waiting, so it exits and ends the run, unless all of them left.
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
// Leaves the world; the next use of it joins one again. Nothing may use it any more.
void leave_world();
at::Device test_device();  // a GPU with nccl, else the CPU

// replicate = 2 × shard = W / 2; created once. W must be even.
const DeviceMesh& hybrid_mesh();

// Collective: whether `mine` is true on every rank, and on any rank.
bool on_every_rank(bool mine);
bool on_any_rank(bool mine);
double sum_over_ranks(double mine);
// Collective: rank 0's text.
std::string text_of_rank_0(const std::string& mine);

// The message of what `act` throws, or "" and a test failure if it throws nothing.
std::string error_of(const std::function<void()>& act);
// Expects `act` to throw a message with each of `words` and, unless it is empty, one of `one_of`.
// Case doesn't matter.
void expect_error(const std::function<void()>& act, const std::vector<std::string>& words,
                  const std::vector<std::string>& one_of = {});
bool contains(const std::string& text, const std::string& word);  // case-insensitive

}  // namespace fsdp::testing
