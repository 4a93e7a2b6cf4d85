// Draw: a random operator on the tape that can be repeated in parts.
//
// How many numbers uniform_ and normal_ take from the CPU's generator for a contiguous tensor
// follows from its size and dtype. So recording doesn't run them: it moves the generator ahead and
// keeps states on the way. A part of the tensor can then be drawn from the state before it, with
// the bits of the whole: by several threads at once, or only the part that a rank keeps. A draw
// that is overwritten before anything reads it is never made.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp::shard::deferred {

struct Draw {
  // Elements between two states, which take 2.5 KB each. A multiple of the 16 that normal_ makes at
  // a time.
  static constexpr int64_t kApart = 1 << 20;

  bool normal = false;
  double a = 0, b = 1;  // mean and deviation, or bounds
  at::ScalarType type = at::kFloat;
  int64_t numel = 0;
  // Before elements 0, kApart, …; the last one serves all elements after it.
  std::vector<at::mt19937_data_pod> states;

  // Whether numel and type, on the CPU, are drawn in a way that is known here.
  bool is_known() const;
  // Sets `states`, and moves the generator to where it is after the draw.
  void skip(at::Generator& generator);
  // Draws elements first to first + out.numel(). out: 1-d, contiguous, of `type`, on the CPU.
  void fill(const at::Tensor& out, int64_t first) const;
  // Differs between two draws of different values, almost certainly.
  int64_t fingerprint() const;

 private:
  int64_t words(int64_t elements) const;  // of the generator
  int64_t end_of(size_t state) const;     // the elements that it serves
  void fill_from(size_t state, const at::Tensor& out, int64_t first) const;
};

}  // namespace fsdp::shard::deferred
