// fill_random_ on the CPU: in chunks that stay in cache, one plain loop per step, which compilers
// turn into vector instructions.
#include "kernels/random.h"

#include <torch/library.h>

#include <array>

#include "kernels/checks.h"
#include "kernels/cpu/dtypes.h"
#include "kernels/cpu/parallel.h"

namespace fsdp::kernels::cpu {
namespace {

using Words = std::array<uint32_t, kChunk + 8>;  // a chunk may begin and end inside a block of four

struct Range {
  bool normal;
  float a, b;  // mean and deviation, or the least value and the width of the range
};

void draw_words(int64_t first_block, int64_t blocks, uint64_t key, uint32_t* to) {
  for (int64_t i = 0; i < blocks; ++i) {
    const random::Four four = random::numbers(first_block + i, key);
    to[4 * i] = four.word[0];
    to[4 * i + 1] = four.word[1];
    to[4 * i + 2] = four.word[2];
    to[4 * i + 3] = four.word[3];
  }
}

void scale_words(const uint32_t* words, int64_t count, const Range& range, float* to) {
  const auto [normal, a, b] = range;
  if (normal)
    for (int64_t i = 0; i < count; ++i) to[i] = a + b * random::normal(words[i]);
  else
    for (int64_t i = 0; i < count; ++i) to[i] = a + b * random::uniform(words[i]);
}

template <typename T>
void fill_chunk(T* out, int64_t first, int64_t count, uint64_t key, const Range& range) {
  Words words;
  const int64_t block = first / 4, end = (first + count + 3) / 4;
  draw_words(block, end - block, key, words.data());
  const uint32_t* from = words.data() + (first - 4 * block);
  if constexpr (std::is_same_v<T, float>) {
    scale_words(from, count, range, out);
  } else {
    std::array<float, kChunk> values;
    scale_words(from, count, range, values.data());
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(values[i]);
  }
}

void fill_random_(const at::Tensor& out, bool normal, double a, double b, int64_t key,
                  int64_t first) {
  const int64_t count = check_fill_random_(out, normal, a, b, key, first);
  const Range range{normal, static_cast<float>(a), static_cast<float>(normal ? b : b - a)};
  with_dtype(out.scalar_type(), [&]<typename T>(T) {
    parallel(count, [&](int64_t, int64_t begin, int64_t end) {
      fill_chunk(write<T>(out) + begin, first + begin, end - begin, static_cast<uint64_t>(key),
                 range);
    });
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(fsdp, CPU, m) {
  m.impl("fill_random_", fill_random_);
}

}  // namespace fsdp::kernels::cpu
