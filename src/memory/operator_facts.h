// What the tape must know of an operator, worked out once for each.
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
    kWrites,      // and may read what was there
    kOverwrites,  // whatever was there
  };

  c10::OperatorHandle op;
  std::vector<Effect> arguments;
  bool writes = false;      // some argument
  bool composite = false;   // made of other operators, which come by one by one
  bool view = false;        // makes no memory and writes none
  bool unknown = false;     // may have effects that its schema does not tell of
  bool kept = false;        // not run again: its results are kept
  bool empty = false;       // memory that somebody fills
  bool random = false;      // reads a generator
  bool expensive = false;   // matrix products, convolutions, attention
  bool batch_norm = false;  // running statistics (3, 4) are written when training (5)
  bool adds = false;        // argument 1 to argument 0 first; their sum is result 1
  int dropout = -1;         // argument: with 0 it is not random after all
};

// Whether the operator, with these arguments on top of the stack, reads a generator.
bool draws(const OperatorFacts& facts, const torch::jit::Stack& stack);

// Of any operator, kept for ever.
const OperatorFacts& facts_of(const c10::OperatorHandle& op);

}  // namespace fsdp::memory
