// The validation split: which samples or documents are held out of training. It depends only on the
// amount of data and the share, so it is the same in every process, at any world size and after a
// resume.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace fsdp::data {

// A sorted set of sample numbers, as ranges.
class SampleSet {
 public:
  SampleSet() = default;                // empty
  explicit SampleSet(int64_t samples);  // all of [0, samples)

  void add(int64_t first, int64_t count);  // `first` must be past everything in the set
  int64_t size() const { return starts_.empty() ? 0 : starts_.back(); }
  int64_t operator[](int64_t i) const;  // the i-th sample, 0 <= i < size()

 private:
  std::vector<int64_t> first_;   // the first sample of each range
  std::vector<int64_t> starts_;  // samples in all ranges up to and including this one
};

struct Split {
  SampleSet training, validation;
};

// The version of the rule below. Checkpoints keep it: a run resumed under another rule would train
// on its validation samples.
inline constexpr const char* kSplitRule = "stretches-64";

// Holds out `share` of `samples`, at least one sample. The data is cut into up to 64 equal parts,
// and a stretch of consecutive samples is held out of each, at a place given by a hash of the
// part's number. Every region of the data is therefore represented, and most held-out samples have
// held-out neighbours. No token is a target in both sets. Throws Error for a share outside [0, 1),
// or with fewer than two samples. Share 0 holds out nothing.
Split split_samples(int64_t samples, double share);

// Whether document number `index` is held out: every (1 / share)-th one is.
bool is_held_out(int64_t index, double share);

}  // namespace fsdp::data
