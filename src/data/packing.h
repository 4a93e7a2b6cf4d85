// Packing: which documents of a source share a sample, so that each is whole.
//
// A document of n tokens takes n - 1 places of a sample: its last token is only a target. Longest
// first, each goes to the sample that it fills best (best-fit decreasing), which wastes about one
// percent of the places or less. The result depends on the documents and on `seq` alone, so it is
// the same on every rank and after a resume. Samples are numbered by their first documents.
//
// The two documents of a pair stay together, the chosen one first. A pair that is longer than a
// sample is left out, because the ends of its answers decide.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "data/source.h"

namespace fsdp::data {

struct PackedDocument {
  int64_t first;   // token of the source
  int64_t tokens;  // at least 2; at most seq + 1
};

class Packing {
 public:
  // Throws Error if the source doesn't say where its documents begin.
  Packing(const TokenSource& source, int64_t seq);

  int64_t samples() const { return static_cast<int64_t>(begins_.size()) - 1; }
  // Those of a sample, in the order of the source.
  std::span<const PackedDocument> documents(int64_t sample) const;
  // The most documents of a sample, with its padding as one; even if there are pairs.
  int64_t most() const { return most_; }
  bool pairs() const { return pairs_; }
  double padding() const;  // the share of all places
  // The length that has as many pairs of tokens per place as the documents.
  double usual_length() const { return usual_length_; }
  // "12,034 examples in 1,530 samples, 1.2 % padding; the ends of 3 longer ones are left out".
  std::string summary() const;

 private:
  std::vector<PackedDocument> whole_documents(const TokenSource& source);
  void place(const std::vector<PackedDocument>& all);

  int64_t seq_;
  bool pairs_;
  std::vector<PackedDocument> documents_;  // by sample
  std::vector<int64_t> begins_;            // where each sample's begin, and their end
  int64_t most_ = 0, places_ = 0;
  int64_t cut_ = 0, cut_tokens_ = 0;  // documents, or pairs, that were longer than a sample
  double usual_length_ = 0;
};

}  // namespace fsdp::data
