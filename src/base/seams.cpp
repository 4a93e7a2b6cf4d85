#include "base/seams.h"

#include <atomic>
#include <list>
#include <utility>

#include "base/mutex.h"

namespace fsdp::base {
namespace {

// All seams are kept: a thread may still use them after their scope.
const Seams* keep(Seams seams) {
  static Mutex mutex;
  static auto* all FSDP_PT_GUARDED_BY(mutex) = new std::list<Seams>;
  Lock lock(mutex);
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
