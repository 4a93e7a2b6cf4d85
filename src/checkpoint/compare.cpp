#include "checkpoint/compare.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <tuple>

#include "checkpoint/overlap.h"
#include "checkpoint/stream.h"
#include "checkpoint/summary.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

constexpr int64_t kWidened = 1 << 20;  // elements converted to double at once

struct SquareSums {                    // over the elements of a tensor
  double of_difference = 0, of_a = 0;  // squares
};

// Calls `visit` with parts of a tensor that are small enough to widen, and their rectangles.
void for_each_part(const at::Tensor& tensor,
                   const std::function<void(const at::Tensor&, const Rectangle&)>& visit) {
  for_each_rectangle(tensor.sizes().vec(), kWidened, [&](const Rectangle& part) {
    at::Tensor narrowed = tensor;
    for (size_t d = 0; d < part.sizes.size(); ++d)
      narrowed = narrowed.narrow(static_cast<int64_t>(d), part.offsets[d], part.sizes[d]);
    visit(narrowed, part);
  });
}

at::Tensor widened(const at::Tensor& tensor, bool complex) {
  return tensor.to(complex ? at::kComplexDouble : at::kDouble).contiguous();
}

// The sum of the squares of all finite elements.
double squares_of(const at::Tensor& a) {
  const at::Tensor squares = widened(a, a.is_complex()).abs().square();
  return squares.masked_fill(squares.isfinite().logical_not(), 0).sum().item<double>();
}

// Adds the differences between two small parts at `place`.
void compare_parts(const at::Tensor& a, const at::Tensor& b, const Rectangle& place,
                   double tolerance, Difference& found, SquareSums& sums) {
  const bool complex = a.is_complex() || b.is_complex();
  const at::Tensor wide_a = widened(a, complex), wide_b = widened(b, complex);
  const bool exact = a.scalar_type() == at::kLong && b.scalar_type() == at::kLong;
  // Equal infinities don't differ, and neither do two NaNs.
  const at::Tensor both_nan = wide_a.isnan().logical_and(wide_b.isnan());
  const at::Tensor unequal =
      (exact ? a.ne(b) : wide_a.ne(wide_b)).logical_and(both_nan.logical_not());
  at::Tensor distance = (wide_a - wide_b).abs();
  distance.masked_fill_(distance.isnan(), std::numeric_limits<double>::infinity());
  distance.masked_fill_(unequal.logical_not(), 0);
  sums.of_difference += distance.square().sum().item<double>();
  sums.of_a += squares_of(a);
  found.differing += (tolerance > 0 ? distance.gt(tolerance) : unequal).sum().item<int64_t>();
  if (!unequal.any().item<bool>()) return;
  int64_t rest = distance.argmax().item<int64_t>();
  const double largest = distance.view({-1})[rest].item<double>();
  if (largest <= found.largest && !found.at.empty()) return;
  found.largest = largest;
  found.at.assign(place.sizes.size(), 0);
  for (size_t d = place.sizes.size(); d-- > 0; rest /= place.sizes[d])
    found.at[d] = place.offsets[d] + rest % place.sizes[d];
}

void compare_pieces(const at::Tensor& a, const at::Tensor& b, const Rectangle& piece,
                    double tolerance, Difference& found, SquareSums& sums) {
  for_each_part(a, [&](const at::Tensor& part_a, const Rectangle& part) {
    at::Tensor part_b = b;
    Rectangle place = part;
    for (size_t d = 0; d < part.sizes.size(); ++d) {
      part_b = part_b.narrow(static_cast<int64_t>(d), part.offsets[d], part.sizes[d]);
      place.offsets[d] += piece.offsets[d];
    }
    compare_parts(part_a, part_b, place, tolerance, found, sums);
  });
}

class Comparing {
 public:
  Comparing(Source& a, Source& b, const CompareOptions& options)
      : a_(a), b_(b), options_(options), known_in_a_(known_in(a, b)), known_in_b_(known_in(b, a)) {}

  Comparison run() {
    for (const auto& [name, entry] : a_.metadata().tensors)
      if (const auto* other = wanted(name) ? b_.tensor(name) : nullptr;
          other && entry.sizes == other->sizes)
        total_ = capped_sum(total_, capped_sum(bytes_of(entry), bytes_of(*other)));
    for (const auto& [name, entry] : a_.metadata().tensors)
      if (wanted(name)) compare_tensor(name, entry);
    for (const auto& [name, entry] : b_.metadata().tensors)
      if (wanted(name) && !a_.tensor(name) && !known_in_a_.contains(places_of(entry)))
        add({DifferenceKind::kOnlyInB, name, {}, {entry.sizes, entry.dtype}});
    if (!options_.model_only) compare_values();
    std::stable_sort(result_.differences.begin(), result_.differences.end(),
                     [](const auto& x, const auto& y) { return x.name < y.name; });
    return std::move(result_);
  }

 private:
  bool wanted(const std::string& name) const {
    return !options_.model_only || name.starts_with("model.");
  }

  static int64_t bytes_of(const TensorEntry& entry) {
    return element_count(entry.sizes) * static_cast<int64_t>(c10::elementSize(entry.dtype));
  }

  void add(Difference difference) { result_.differences.push_back(std::move(difference)); }

  // Where the bytes of a tensor are; the same for all names of one tensor.
  using Chunks = std::vector<std::tuple<std::string, int64_t, std::vector<int64_t>>>;
  static Chunks places_of(const TensorEntry& entry) {
    Chunks places;
    for (const auto& chunk : entry.chunks)
      places.emplace_back(chunk.place.file, chunk.place.offset, chunk.rectangle.offsets);
    return places;
  }

  // Bytes of `mine` under a name that `theirs` also has; further names of them aren't a difference.
  static std::set<Chunks> known_in(const Source& theirs, const Source& mine) {
    std::set<Chunks> known;
    for (const auto& [name, entry] : mine.metadata().tensors)
      if (theirs.tensor(name) && element_count(entry.sizes) > 0) known.insert(places_of(entry));
    return known;
  }

  void compare_tensor(const std::string& name, const TensorEntry& entry) {
    const Side a{entry.sizes, entry.dtype};
    const TensorEntry* other = b_.tensor(name);
    if (!other) {
      if (!known_in_b_.contains(places_of(entry))) add({DifferenceKind::kOnlyInA, name, a, {}});
      return;
    }
    ++result_.compared;
    Difference found{DifferenceKind::kElements, name, a, {other->sizes, other->dtype}};
    if (entry.sizes != other->sizes) {
      found.kind = DifferenceKind::kShape;
      return add(std::move(found));
    }
    compare_elements(found);
    if (entry.dtype != other->dtype && (options_.tolerance <= 0 || found.differing > 0))
      found.kind = DifferenceKind::kDtype;
    if (found.differing == 0 && found.kind == DifferenceKind::kElements)
      ++result_.equal;
    else
      add(std::move(found));
  }

  void compare_elements(Difference& found) {
    const Rectangle all = everything(found.a.sizes);
    a_.check(found.name, all);
    b_.check(found.name, all);
    found.elements = element_count(all.sizes);
    const auto width = static_cast<int64_t>(
        std::max(c10::elementSize(found.a.dtype), c10::elementSize(found.b.dtype)));
    const auto read = [&](Source& source, at::ScalarType dtype, const Rectangle& piece) {
      at::Tensor memory = at::empty(piece.sizes, at::TensorOptions().dtype(dtype));
      source.read(found.name, {piece, memory});
      return memory;
    };
    SquareSums sums;
    std::vector<Rectangle> same;  // pieces
    for_each_rectangle(all.sizes, kPieceBytes / width, [&](const Rectangle& piece) {
      const at::Tensor a = read(a_, found.a.dtype, piece), b = read(b_, found.b.dtype, piece);
      if (found.a.dtype == found.b.dtype &&
          std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0)
        same.push_back(piece);
      else
        compare_pieces(a, b, piece, options_.tolerance, found, sums);
      done_ += static_cast<int64_t>(a.nbytes() + b.nbytes());
      if (options_.progress) options_.progress(done_, total_);
    });
    if (sums.of_difference <= 0) return;
    // A difference was found, so the norm of all of A is needed after all.
    for (const auto& piece : same)
      for_each_part(read(a_, found.a.dtype, piece), [&](const at::Tensor& part, const Rectangle&) {
        sums.of_a += squares_of(part);
      });
    found.relative = sums.of_a > 0 ? std::sqrt(sums.of_difference / sums.of_a)
                                   : std::numeric_limits<double>::infinity();
  }

  // --- plain values ---

  void compare_values() {
    std::set<std::string> names;
    for (const auto* source : {&a_, &b_})
      for (const auto& [name, place] : source->metadata().values) names.insert(name);
    for (const auto& name : names) {
      const bool in_a = a_.metadata().values.contains(name);
      const bool in_b = b_.metadata().values.contains(name);
      const auto a = in_a ? a_.value(name) : std::nullopt;
      const auto b = in_b ? b_.value(name) : std::nullopt;
      if (in_a && in_b) ++result_.compared;
      if (in_a && in_b && !a && !b) {
        ++result_.unread;
      } else if (in_a && in_b && a && b && *text_of(a) == *text_of(b)) {
        ++result_.equal;
      } else {
        const auto kind = !in_a   ? DifferenceKind::kOnlyInB
                          : !in_b ? DifferenceKind::kOnlyInA
                                  : DifferenceKind::kPlain;
        constexpr const char* kUnread = "(unsupported Python type)";
        add({kind,
             name,
             {.value = text_of(a).value_or(kUnread)},
             {.value = text_of(b).value_or(kUnread)}});
      }
    }
  }

  static std::optional<std::string> text_of(const std::optional<Value>& value) {
    if (!value) return std::nullopt;
    return value_text(*value);
  }

  Source& a_;
  Source& b_;
  const CompareOptions& options_;
  std::set<Chunks> known_in_a_;  // bytes of b
  std::set<Chunks> known_in_b_;  // bytes of a
  int64_t done_ = 0, total_ = 0;
  Comparison result_;
};

}  // namespace

Comparison compare(Source& a, Source& b, const CompareOptions& options) {
  return Comparing(a, b, options).run();
}

}  // namespace fsdp::checkpoint
