// compare: what differs between two checkpoints, tensor by tensor. Values are read in pieces, so
// that memory does not grow with the model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/source.h"

namespace fsdp::checkpoint {

struct Side {  // of a difference, as one of the two has it
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  std::optional<std::string> value = {};  // of a plain value; none: it is a tensor
};

struct Difference {
  enum Kind { kOnlyInA, kOnlyInB, kShape, kDtype, kElements, kPlain } kind;
  std::string name;
  Side a, b;
  // Where shapes are equal:
  int64_t elements = 0;     // of the tensor
  int64_t differing = 0;    // of these, by more than the tolerance
  double largest = 0;       // |a - b|; infinite where just one of them is no number
  std::vector<int64_t> at;  // where that is
  double relative = 0;      // the norm of a - b, divided by that of a
};

struct CompareOptions {
  // Elements differ where |a - b| is larger. Above zero, dtypes may differ: then values count.
  double tolerance = 0;
  bool model_only = false;                                         // just what is named "model.…"
  std::function<void(int64_t done, int64_t total)> progress = {};  // bytes of A and B
};

struct Comparison {
  int64_t compared = 0;  // names that both have
  int64_t equal = 0;
  int64_t unread = 0;                   // plain values of Python types that are not read
  std::vector<Difference> differences;  // by name
};

// A name that just one side has is no difference where it stands for a tensor that the other has
// under another name of it (tied weights, which Hugging Face stores once).
Comparison compare(Source& a, Source& b, const CompareOptions& options = {});

}  // namespace fsdp::checkpoint
