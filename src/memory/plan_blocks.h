// Blocks: simulates LibTorch's caching allocator for GPUs.
//
// Requests are rounded to 512 bytes and cut from segments: 2 MiB for requests up to 1 MiB, 20 MiB
// for requests below 10 MiB, else the request itself, rounded to 2 MiB. An unused segment can be
// freed; a partly used one can't, and its free space is fragmentation if no request fits in it.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <set>

namespace fsdp::memory {

class Blocks {
 public:
  struct Segment;
  struct Block {
    int64_t size = 0;
    bool used = false;
    Segment* segment = nullptr;
    std::list<Block>::iterator self;  // in its segment
  };
  struct Segment {
    int64_t size = 0, used = 0;
    bool small = false;
    std::list<Block> blocks;  // by address
  };

  ~Blocks();
  Block* allocate(int64_t bytes);
  void release(Block* block);

  int64_t allocated() const { return allocated_; }  // bytes of used blocks
  int64_t held() const { return held_; }            // bytes of segments with a used block

 private:
  using Free = std::multimap<int64_t, Block*>;
  void add_free(Block* block);
  void remove_free(Block* block);

  std::set<std::unique_ptr<Segment>> segments_;
  Free small_, large_;
  int64_t allocated_ = 0, held_ = 0;
};

}  // namespace fsdp::memory
