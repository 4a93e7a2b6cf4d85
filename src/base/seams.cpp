#include "base/seams.h"

#include <atomic>
#include <list>
#include <mutex>
#include <utility>

namespace fsdp::base {
namespace {

// All seams are kept: a thread may still use them after their scope.
const Seams* keep(Seams seams) {
  static std::mutex mutex;
  static auto* all = new std::list<Seams>;
  std::lock_guard lock(mutex);
  return &all->emplace_back(std::move(seams));
}

std::atomic<const Seams*>& current_seams() {
  static std::atomic<const Seams*> current = keep({});
  return current;
}

}  // namespace

const Seams& seams() {
  return *current_seams().load(std::memory_order_acquire);
}

WithSeams::WithSeams(Seams seams) : before_(current_seams().exchange(keep(std::move(seams)))) {}

WithSeams::~WithSeams() {
  current_seams() = before_;
}

}  // namespace fsdp::base
