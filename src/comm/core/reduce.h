// Reductions over plain memory: the only place where values of several ranks are combined.
//
// Every backend that computes its own sums (shm, mpi) calls this with the sources in rank order, so
// all give the same bits, on every run and with any number of threads.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <span>

#include "fsdp/reduce_op.h"

namespace fsdp::comm {

const char* name(ReduceOp op);

// Bytes of one element. LibTorch's own function needs its libraries, which this folder doesn't use.
int64_t element_size(c10::ScalarType type);

// to[i] = from[0][i] + from[1][i] + …, left to right; `to` may be one of the sources. 16-bit floats
// are combined in fp32 and rounded once at the end; integers wrap; an average divides at the end;
// max and min propagate NaN. Throws an Error for a type that reducible() rejects.
void reduce(void* to, std::span<const void* const> from, int64_t count, c10::ScalarType type,
            ReduceOp op);

bool reducible(c10::ScalarType type);  // whether reduce() accepts it

// Runs body(begin, end) over parts of [0, count), possibly on several threads; returns when all are
// done.
using Parallel =
    std::function<void(int64_t count, const std::function<void(int64_t, int64_t)>& body)>;

}  // namespace fsdp::comm
