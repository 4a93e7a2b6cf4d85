// Blocks: what LibTorch's caching allocator for GPUs would do with a row of requests.
//
// Requests are rounded to 512 bytes and cut from segments: 2 MiB for what is at most 1 MiB, 20 MiB
// for what is below 10 MiB, else the request itself, rounded to 2 MiB. A segment that nobody uses
// can be given back; one that is used in part cannot, and what is free in it counts as
// fragmentation when nothing fits there.
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

  int64_t allocated() const { return allocated_; }  // blocks that are used
  int64_t held() const { return held_; }            // segments that are used at least in part

 private:
  using Free = std::multimap<int64_t, Block*>;
  void add_free(Block* block);
  void remove_free(Block* block);

  std::set<std::unique_ptr<Segment>> segments_;
  Free small_, large_;
  int64_t allocated_ = 0, held_ = 0;
};

}  // namespace fsdp::memory
