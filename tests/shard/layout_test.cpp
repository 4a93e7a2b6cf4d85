// Layouts of the units of real models on many numbers of ranks, and of odd parameters.
#include "shard/layout.h"

#include <gtest/gtest.h>

#include <random>

#include "shard/rectangles.h"

namespace fsdp::shard {
namespace {

std::vector<Extent> matrices(std::initializer_list<std::pair<int64_t, int64_t>> shapes) {
  std::vector<Extent> extents;
  for (auto [rows, columns] : shapes) extents.push_back({rows * columns, columns});
  return extents;
}

std::vector<Extent> llama_block(int64_t d, int64_t kv, int64_t ffn) {
  return matrices({{d, 1}, {d, d}, {kv, d}, {kv, d}, {d, d}, {d, 1}, {ffn, d}, {ffn, d}, {d, ffn}});
}

// True of every layout: parts are in order, complete, without overlap, aligned.
void expect_sound(const Layout& layout, const std::vector<Extent>& extents) {
  EXPECT_EQ(layout.shard_numel() % Layout::kAlign, 0);
  int64_t last = 0;
  for (size_t i = 0; i < extents.size(); ++i) {
    EXPECT_GE(layout.offset(i), last);
    last = layout.offset(i) + extents[i].numel;
    int64_t next = 0;
    for (int rank = 0; rank < layout.world(); ++rank) {
      Slice slice = layout.slice(i, rank);
      if (slice.numel == 0) continue;
      EXPECT_EQ(slice.begin, next);
      EXPECT_EQ(rank * layout.shard_numel() + slice.offset, layout.offset(i) + slice.begin);
      EXPECT_LE(slice.offset + slice.numel, layout.shard_numel());
      next += slice.numel;
    }
    EXPECT_EQ(next, extents[i].numel);
  }
  EXPECT_LE(last, layout.full_numel());
}

bool cuts_on_rows(const Layout& layout, const std::vector<Extent>& extents) {
  for (size_t i = 0; i < extents.size(); ++i)
    for (int rank = 0; rank < layout.world(); ++rank) {
      Slice slice = layout.slice(i, rank);
      if (slice.begin % extents[i].row != 0 || slice.numel % extents[i].row != 0) return false;
    }
  return true;
}

struct ModelShape {
  const char* name;
  int64_t layers;
  std::vector<Extent> block, root;
};

std::vector<ModelShape> models() {
  auto llama = [](const char* name, int64_t layers, int64_t d, int64_t kv, int64_t ffn, int64_t v) {
    return ModelShape{name, layers, llama_block(d, kv, ffn), matrices({{v, d}, {d, 1}, {v, d}})};
  };
  auto mlp = [](const char* name, int64_t width) {
    return ModelShape{name, 8, matrices({{width, width}, {width, 1}}), {}};
  };
  return {llama("182M", 24, 768, 768, 2048, 8192),
          llama("953M", 16, 2048, 2048, 5632, 32000),
          llama("3.6B", 28, 3072, 1024, 8192, 128256),
          llama("117M", 4, 1024, 1024, 2816, 32000),
          llama("13.8M", 6, 384, 384, 1024, 4096),
          mlp("MLP 20480", 20480),
          mlp("MLP 2048", 2048)};
}

TEST(Layout, PaddingStaysUnderOnePercentFrom2To64Ranks) {
  for (const ModelShape& model : models())
    for (int world = 2; world <= 64; ++world) {
      Layout block(model.block, world, Cut::AUTO), root(model.root, world, Cut::AUTO);
      expect_sound(block, model.block);
      int64_t padding = block.padding() * model.layers, all = block.full_numel() * model.layers;
      if (!model.root.empty()) {
        expect_sound(root, model.root);
        padding += root.padding();
        all += root.full_numel();
      }
      EXPECT_LT(static_cast<double>(padding) / static_cast<double>(all - padding), 0.01)
          << model.name << " on " << world << " ranks";
    }
}

TEST(Layout, EveryCutFallsOnARowOnTheUsualNumbersOfRanks) {
  for (const ModelShape& model : models())
    for (int world : {2, 4, 8}) {
      Layout layout(model.block, world, Cut::AUTO);
      EXPECT_EQ(layout.cut(), Cut::ROW) << model.name << " on " << world;
      EXPECT_TRUE(cuts_on_rows(layout, model.block)) << model.name << " on " << world;
    }
}

TEST(Layout, RowsAndTensorsStayWholeWhenAskedFor) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<Extent> extents;
    for (int i = 0; i < 1 + static_cast<int>(random() % 9); ++i) {
      int64_t rows = random() % 40, row = 1 + random() % 50;
      extents.push_back({rows * row, row});
    }
    int world = 1 + static_cast<int>(random() % 9);
    for (Cut cut : {Cut::AUTO, Cut::ROW, Cut::ELEMENT, Cut::TENSOR}) {
      Layout layout(extents, world, cut);
      expect_sound(layout, extents);
      EXPECT_TRUE(cut != Cut::ROW || cuts_on_rows(layout, extents));
      if (cut != Cut::TENSOR) continue;
      for (size_t i = 0; i < extents.size(); ++i)
        for (int rank = 0; rank < world; ++rank) {
          int64_t numel = layout.slice(i, rank).numel;
          EXPECT_TRUE(numel == 0 || numel == extents[i].numel);
        }
    }
  }
}

TEST(Layout, HoldsNothingAndScalarsAndPrimes) {
  std::vector<Extent> extents{{0, 1}, {1, 1}, {7919, 7919}, {13, 1}, {0, 1}, {6, 3}};
  for (int world : {1, 2, 3, 7, 64}) {
    expect_sound(Layout(extents, world, Cut::AUTO), extents);
    expect_sound(Layout({}, world, Cut::AUTO), {});
  }
}

TEST(Layout, BlocksAreNeverCut) {
  constexpr int64_t kBlock = 256;
  std::vector<std::vector<Extent>> all{llama_block(384, 128, 1024),
                                       llama_block(100, 20, 260),
                                       {{7919, 7919}, {13, 1}, {0, 1}, {6, 3}, {100000, 10}}};
  for (const ModelShape& model : models()) all.push_back(model.block);
  for (const auto& extents : all)
    for (int world : {1, 2, 3, 4, 7, 64})
      for (Cut cut : {Cut::AUTO, Cut::ROW, Cut::ELEMENT, Cut::TENSOR}) {
        Layout layout(extents, world, cut, kBlock);
        expect_sound(layout, extents);
        EXPECT_EQ(layout.shard_numel() % kBlock, 0);
        EXPECT_TRUE(layout.cut() != Cut::ROW || cuts_on_rows(layout, extents));
        for (size_t i = 0; i < extents.size(); ++i) EXPECT_EQ(layout.offset(i) % kBlock, 0);
      }
}

TEST(Rectangles, CoverARunExactly) {
  std::vector<int64_t> sizes{4, 3, 5};
  for (const std::vector<int64_t>& order :
       {std::vector<int64_t>{0, 1, 2}, std::vector<int64_t>{2, 0, 1},
        std::vector<int64_t>{1, 2, 0}})
    for (int64_t begin = 0; begin <= 60; ++begin)
      for (int64_t end = begin; end <= 60; ++end) {
        std::vector<int> covered(60);
        for (const Rectangle& r : rectangles_of(sizes, order, begin, end - begin))
          for (int64_t a = 0; a < r.sizes[0]; ++a)
            for (int64_t b = 0; b < r.sizes[1]; ++b)
              for (int64_t c = 0; c < r.sizes[2]; ++c) {
                int64_t index[] = {r.offsets[0] + a, r.offsets[1] + b, r.offsets[2] + c};
                int64_t place = 0;
                for (int64_t d : order) place = place * sizes[d] + index[d];
                ++covered[place];
              }
        for (int64_t i = 0; i < 60; ++i) ASSERT_EQ(covered[i], i >= begin && i < end);
      }
}

TEST(Rectangles, WholeRowsAreOne) {
  EXPECT_EQ(rectangles_of({6, 4}, {0, 1}, 8, 12), (std::vector<Rectangle>{{{2, 0}, {3, 4}}}));
  EXPECT_EQ(rectangles_of({}, {}, 0, 1), (std::vector<Rectangle>{{{}, {}}}));
  EXPECT_TRUE(rectangles_of({6, 4}, {0, 1}, 8, 0).empty());
}

}  // namespace
}  // namespace fsdp::shard
