#include "comm/store.h"

#include <algorithm>

#include "fsdp/error.h"

namespace fsdp::comm {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

void await_ranks(c10d::Store& store, const std::string& prefix, int size, milliseconds timeout,
                 const std::string& what) {
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(prefix + "/" + std::to_string(r));
  auto deadline = steady_clock::now() + timeout;
  // In slices: a store's own wait holds the connection, and cannot say who it is that did not come.
  while (!store.check(keys)) {
    auto left = std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now());
    if (left.count() <= 0) break;
    try {
      store.wait(keys, std::min(left, milliseconds(1000)));
      return;
    } catch (const std::exception&) {
    }
  }
  std::string missing;
  int absent = 0;
  for (int r = 0; r < size; ++r) {
    if (store.check({keys[r]})) continue;
    if (++absent <= 16) missing += (absent > 1 ? ", " : "") + std::to_string(r);
  }
  if (absent == 0) return;
  if (absent > 16) missing += ", …";
  throw Error(what + ": " + std::to_string(absent) + " of " + std::to_string(size) +
                  " ranks did not come in " + std::to_string(timeout.count() / 1000) +
                  " s: rank " + missing + " missing.",
              "see whether those processes run and what they printed; every rank must make the same "
              "communicators in the same order. FSDP_TIMEOUT (seconds) allows more time.");
}

shm::Exchange exchange_over(Store store, const std::string& what) {
  return {
      [store](const std::string& key, const std::string& value) { store->set(key, value); },
      [store, what](const std::string& key, milliseconds timeout) {
        try {
          store->wait({key}, timeout);
        } catch (const std::exception&) {
          std::string who = key.substr(0, 5) == "host/" ? "rank " + key.substr(5) : "rank 0";
          throw Error(what + ": " + who + " did not come in " +
                          std::to_string(timeout.count() / 1000) + " s.",
                      "see whether that process runs and what it printed; every rank must make the "
                      "same communicators in the same order.");
        }
        return store->get_to_str(key);
      }};
}

}  // namespace fsdp::comm
