// Pickles: read and walked. Whatever can be read keeps what pickle.h promises.
#include <cstdlib>
#include <unordered_set>

#include "checkpoint/pickle.h"

namespace pickle = fsdp::checkpoint::pickle;

namespace {

// Depth is bounded, and shared values are visited once; otherwise this wouldn't end.
void look(const pickle::Pickled& value, int depth, std::unordered_set<const void*>& seen) {
  if (depth > 64) std::abort();
  if (!seen.insert(&value).second) return;
  if (value.is(pickle::kDict) && value.items.size() % 2 != 0) std::abort();
  if (value.is(pickle::kObject) && !value.items.at(0)->is(pickle::kTuple)) std::abort();
  value.find("key");
  for (const auto& item : value.items) look(*item, depth + 1, seen);
  if (value.state) look(*value.state, depth + 1, seen);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto allowed = [](const std::string& name) {
    if (name.find("system") != std::string::npos) return false;
    return name.starts_with("torch.") || name == "collections.OrderedDict";
  };
  try {
    const auto root = pickle::read({reinterpret_cast<const char*>(data), size}, "fuzzed", allowed);
    std::unordered_set<const void*> seen;
    look(*root, 1, seen);
  } catch (const fsdp::Error&) {
  }
  return 0;
}
