// Layout: the offset of each parameter in a unit's flat buffer, and the cuts of the buffer into
// shards.
//
// Parameters are packed in order, each contiguous; the buffer is cut into `world` equal shards of a
// multiple of 64 elements (128 bytes in bf16). The gathered buffer *is* the parameters, so the cuts
// of a parameter that spans several shards are one shard apart. They can all fall between rows only
// if the shard is a multiple of the row. Where that costs too much padding (many ranks, small
// units, rows of different length), Cut::AUTO cuts inside rows instead. Offsets are in elements.
//
// With `blocks`, parameters are divided into blocks of that many elements, each from its first
// element on, and no cut falls inside a block: a block's values don't depend on the cuts.
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp/sharding.h"

namespace fsdp::shard {

struct Extent {  // of a parameter
  int64_t numel;
  int64_t row;  // elements of one row (of the outermost dimension in memory); at least 1
};

struct Slice {     // a rank's part of one parameter
  int64_t begin;   // first element, in the parameter's memory order
  int64_t numel;   // 0 when this rank has none of it
  int64_t offset;  // in the rank's shard
};

class Layout {
 public:
  static constexpr int64_t kAlign = 64;

  Layout() = default;
  Layout(std::vector<Extent> parameters, int world, Cut cut, int64_t blocks = 0);

  int world() const { return world_; }
  Cut cut() const { return cut_; }  // never AUTO: ROW, ELEMENT or TENSOR
  int64_t shard_numel() const { return shard_; }
  int64_t full_numel() const { return shard_ * world_; }
  int64_t padding() const { return full_numel() - used_; }
  int64_t offset(size_t parameter) const { return offsets_[parameter]; }
  int64_t numel(size_t parameter) const { return parameters_[parameter].numel; }
  Slice slice(size_t parameter, int rank) const;

 private:
  int64_t aligned(int64_t n) const { return (n + align_ - 1) / align_ * align_; }
  int64_t row_of(const Extent& p, Cut cut) const;
  bool place(int64_t shard, Cut cut, std::vector<int64_t>& offsets) const;
  int64_t search(Cut cut, int64_t limit, std::vector<int64_t>& offsets) const;

  std::vector<Extent> parameters_;
  int world_ = 1;
  Cut cut_ = Cut::ROW;
  bool blocks_ = false;
  int64_t align_ = kAlign;  // of shards, and of parameters unless they are small
  int64_t shard_ = 0;
  int64_t used_ = 0;
  std::vector<int64_t> offsets_;
};

}  // namespace fsdp::shard
