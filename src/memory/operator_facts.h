// What the tape must know about an operator, computed once per operator.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <vector>

namespace fsdp::memory {

struct OperatorFacts {
  explicit OperatorFacts(const c10::OperatorHandle& handle);

  enum Effect : uint8_t {
    kReads,
    kWrites,      // and may read the old contents
    kOverwrites,  // without reading the old contents
  };

  c10::OperatorHandle op;
  std::vector<Effect> arguments;
  bool writes = false;      // to some argument
  bool composite = false;   // made of other operators, which are dispatched one by one
  bool view = false;        // allocates no memory and writes none
  bool unknown = false;     // may have effects that its schema doesn't declare
  bool kept = false;        // not replayed: its results are kept
  bool empty = false;       // allocates uninitialized memory
  bool random = false;      // reads a generator
  bool expensive = false;   // matrix products, convolutions, attention
  bool batch_norm = false;  // running statistics (3, 4) are written when training (5)
  bool adds = false;        // first adds argument 1 to argument 0; the sum is result 1
  int dropout = -1;         // index of the dropout probability; not random if that is 0
};

// Whether the operator reads a generator, given its arguments on top of the stack.
bool draws(const OperatorFacts& facts, const torch::jit::Stack& stack);

// The facts of any operator; never freed.
const OperatorFacts& facts_of(const c10::OperatorHandle& op);

}  // namespace fsdp::memory
