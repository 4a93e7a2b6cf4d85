#include "data/packing.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "base/format.h"
#include "base/table.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

// A sample has at most this many documents, or as many as it would have of kShort tokens. Room for
// more would cost a GPU the memory of 128 tokens each, in every batch.
constexpr int64_t kFewest = 16, kShort = 32;

int64_t places_of(const PackedDocument& document) {
  return document.tokens - 1;
}

// The sample of each item, longest first; `samples` becomes their number.
std::vector<int64_t> best_fit(const std::vector<int64_t>& needs, int64_t seq, size_t most,
                              int64_t& samples) {
  std::vector<int64_t> order(needs.size()), sample_of(needs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return needs[static_cast<size_t>(a)] > needs[static_cast<size_t>(b)];
  });
  std::map<int64_t, std::vector<int64_t>> open;  // samples by the places left in them
  std::vector<size_t> items;                     // in each sample
  samples = 0;
  for (int64_t i : order) {
    const int64_t need = needs[static_cast<size_t>(i)];
    int64_t room = seq, sample = samples;
    if (const auto fits = open.lower_bound(need); fits != open.end()) {
      room = fits->first;
      sample = fits->second.back();
      fits->second.pop_back();
      if (fits->second.empty()) open.erase(fits);
    } else {
      ++samples;
      items.push_back(0);
    }
    const bool full = ++items[static_cast<size_t>(sample)] == most;
    sample_of[static_cast<size_t>(i)] = sample;
    if (room > need && !full) open[room - need].push_back(sample);
  }
  return sample_of;
}

}  // namespace

Packing::Packing(const TokenSource& source, int64_t seq) : seq_(seq), pairs_(source.info().pairs) {
  if (!source.lists_documents())
    throw Error("documents can't be packed: the data doesn't list them.",
                "use JSON lines, text, or token files with an index (fsdp tokenize --format "
                "megatron); or set data.packing to false.");
  const std::vector<PackedDocument> all = whole_documents(source);
  if (all.empty())
    throw Error(pairs_ ? "the data has no pair of answers that fits into a sample."
                       : "the data has no document of two tokens or more to pack.",
                pairs_ ? "raise data.seq, or use more data." : "use more data.");
  double squares = 0;
  for (const PackedDocument& document : all) {
    const auto places = static_cast<double>(places_of(document));
    squares += places * places;
    places_ += places_of(document);
  }
  usual_length_ = squares / static_cast<double>(places_);
  place(all);
}

// Those that are packed, with at most seq places each.
std::vector<PackedDocument> Packing::whole_documents(const TokenSource& source) {
  std::vector<int64_t> starts = source.document_starts(0, source.tokens());
  starts.push_back(source.tokens());
  std::vector<PackedDocument> all;
  auto document = [&](size_t i) { return PackedDocument{starts[i], starts[i + 1] - starts[i]}; };
  if (pairs_) {
    for (size_t i = 0; i + 2 < starts.size(); i += 2) {
      const PackedDocument chosen = document(i), rejected = document(i + 1);
      const int64_t needs = places_of(chosen) + places_of(rejected);
      if (std::min(chosen.tokens, rejected.tokens) < 2) continue;
      if (needs <= seq_) {
        all.insert(all.end(), {chosen, rejected});
        continue;
      }
      ++cut_;
      cut_tokens_ += chosen.tokens + rejected.tokens;
    }
    return all;
  }
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    PackedDocument next = document(i);
    if (next.tokens < 2) continue;  // nothing to predict
    if (next.tokens > seq_ + 1) {
      ++cut_;
      cut_tokens_ += next.tokens - (seq_ + 1);
      next.tokens = seq_ + 1;
    }
    all.push_back(next);
  }
  return all;
}

void Packing::place(const std::vector<PackedDocument>& all) {
  const size_t together = pairs_ ? 2 : 1;
  const auto most = static_cast<size_t>(std::max<int64_t>(kFewest, seq_ / kShort)) / together;
  std::vector<int64_t> needs(all.size() / together, 0);
  for (size_t i = 0; i < all.size(); ++i) needs[i / together] += places_of(all[i]);
  int64_t samples = 0;
  std::vector<int64_t> sample_of = best_fit(needs, seq_, most, samples);
  std::vector<int64_t> number(static_cast<size_t>(samples), -1);
  begins_.assign(static_cast<size_t>(samples) + 1, 0);
  int64_t next = 0;
  for (int64_t& sample : sample_of) {
    int64_t& known = number[static_cast<size_t>(sample)];
    if (known < 0) known = next++;
    sample = known;
    begins_[static_cast<size_t>(sample) + 1] += static_cast<int64_t>(together);
  }
  std::partial_sum(begins_.begin(), begins_.end(), begins_.begin());
  std::vector<int64_t> at(begins_.begin(), begins_.end() - 1);
  documents_.resize(all.size());
  for (size_t i = 0; i < all.size(); ++i)
    documents_[static_cast<size_t>(at[static_cast<size_t>(sample_of[i / together])]++)] = all[i];
  for (int64_t sample = 0; sample < samples; ++sample) {
    const auto whole = documents(sample);
    int64_t filled = 0;
    for (const PackedDocument& document : whole) filled += places_of(document);
    most_ = std::max(most_, static_cast<int64_t>(whole.size()) + (filled < seq_ ? 1 : 0));
  }
  if (pairs_) most_ += most_ % 2;
}

std::span<const PackedDocument> Packing::documents(int64_t sample) const {
  const auto begin = static_cast<size_t>(begins_[static_cast<size_t>(sample)]);
  const auto end = static_cast<size_t>(begins_[static_cast<size_t>(sample) + 1]);
  return std::span(documents_).subspan(begin, end - begin);
}

double Packing::padding() const {
  return 1 - static_cast<double>(places_) / (static_cast<double>(samples()) * double(seq_));
}

std::string Packing::summary() const {
  const auto count = static_cast<int64_t>(documents_.size()) / (pairs_ ? 2 : 1);
  std::string text =
      formatted("{} {} in {} samples, {:.1f} % padding", with_separators(count),
                pairs_ ? "pairs" : "examples", with_separators(samples()), 100 * padding());
  if (cut_ > 0 && pairs_)
    text += formatted("; {} longer than data.seq {} left out", with_separators(cut_),
                      cut_ == 1 ? "is" : "are");
  else if (cut_ > 0)
    text += formatted("; {} longer than data.seq lose{} the end, {} tokens", with_separators(cut_),
                      cut_ == 1 ? "s" : "", with_separators(cut_tokens_));
  return text;
}

}  // namespace fsdp::data
