// compare: the differences between two checkpoints, tensor by tensor. Tensors are read in pieces,
// so memory doesn't grow with the model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/source.h"

namespace fsdp::checkpoint {

struct Side {  // one checkpoint's side of a difference
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  std::optional<std::string> value = {};  // of a plain value; nullopt for a tensor
};

enum class DifferenceKind { kOnlyInA, kOnlyInB, kShape, kDtype, kElements, kPlain };

struct Difference {
  DifferenceKind kind;
  std::string name;
  Side a, b;
  // If the shapes are equal:
  int64_t elements = 0;     // of the tensor
  int64_t differing = 0;    // elements that differ by more than the tolerance
  double largest = 0;       // largest |a - b|; infinite if only one of the two is NaN
  std::vector<int64_t> at;  // index of the largest
  double relative = 0;      // norm of a - b divided by the norm of a
};

struct CompareOptions {
  // Elements differ if |a - b| is larger. Above zero, only values count and dtypes may differ.
  double tolerance = 0;
  bool model_only = false;                                         // only names "model.…"
  std::function<void(int64_t done, int64_t total)> progress = {};  // bytes of A and B
};

struct Comparison {
  int64_t compared = 0;  // names that both have
  int64_t equal = 0;
  int64_t unread = 0;                   // plain values of unsupported Python types
  std::vector<Difference> differences;  // by name
};

// A name that only one side has isn't a difference if the other side has the same tensor under
// another of its names (tied weights, which Hugging Face stores once).
Comparison compare(Source& a, Source& b, const CompareOptions& options = {});

}  // namespace fsdp::checkpoint
