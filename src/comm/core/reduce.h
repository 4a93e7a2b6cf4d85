// Reductions over plain memory: the one place where values of several ranks are added.
//
// Every communicator of ours that computes its own sums (shm, mpi) calls this with the sources in
// rank order, so that they give the same bits, on every run and for any number of threads.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <span>

#include "fsdp/reduce_op.h"

namespace fsdp::comm {

const char* name(ReduceOp op);

// Bytes of one element. LibTorch's own needs its libraries, which this folder does without.
int64_t element_size(c10::ScalarType type);

// to[i] = from[0][i] + from[1][i] + …, left to right; `to` may be one of the sources. 16-bit floats
// are combined in fp32 and rounded once at the end; integers wrap; an average divides at the end; a
// NaN wins every maximum and minimum. Throws Error for a type that has no arithmetic here.
void reduce(void* to, std::span<const void* const> from, int64_t count, c10::ScalarType type,
            ReduceOp op);

bool reducible(c10::ScalarType type);  // whether reduce() takes it

// Runs body(begin, end) over parts of [0, count), possibly on several threads; returns when all are
// done.
using Parallel =
    std::function<void(int64_t count, const std::function<void(int64_t, int64_t)>& body)>;

}  // namespace fsdp::comm
