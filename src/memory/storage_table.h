// StorageTable: a hash table from storages to numbers. It is queried for every argument of every
// recorded operator: one array, linear probing, no removal.
#pragma once

#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <vector>

namespace fsdp::memory {

class StorageTable {
 public:
  int32_t find(const c10::StorageImpl* storage) const {  // -1: not found
    if (slots_.empty()) return -1;
    for (size_t i = place_of(storage);; i = (i + 1) & (slots_.size() - 1)) {
      if (slots_[i].storage == storage) return slots_[i].number;
      if (!slots_[i].storage) return -1;
    }
  }

  void add(const c10::StorageImpl* storage, int32_t number) {
    if (2 * (count_ + 1) > slots_.size()) grow();
    ++count_;
    put(storage, number);
  }

  void clear() {
    slots_ = {};
    count_ = 0;
  }

 private:
  struct Slot {
    const c10::StorageImpl* storage = nullptr;
    int32_t number = -1;
  };

  size_t place_of(const c10::StorageImpl* storage) const {
    auto bits = reinterpret_cast<uintptr_t>(storage) >> 4;
    return (bits * 0x9E3779B97F4A7C15ull >> 32) & (slots_.size() - 1);
  }

  void put(const c10::StorageImpl* storage, int32_t number) {
    size_t i = place_of(storage);
    while (slots_[i].storage) i = (i + 1) & (slots_.size() - 1);
    slots_[i] = {storage, number};
  }

  void grow() {
    std::vector<Slot> old(slots_.empty() ? 64 : 2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old)
      if (slot.storage) put(slot.storage, slot.number);
  }

  std::vector<Slot> slots_;  // size is a power of two
  size_t count_ = 0;
};

}  // namespace fsdp::memory
