#include "comm/store.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/exit_code.h"
#include "base/format.h"
#include "comm/store_client.h"
#include "fsdp/error.h"

namespace fsdp::comm {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

constexpr milliseconds kPatient{2000}, kBrief{100};  // for an answer
constexpr milliseconds kLook{300};                   // between two looks for trouble

// A handle on the same store whose calls end after `limit`. A world of one has c10d's HashStore,
// which isn't copied and never waits.
Store limited(const Store& store, milliseconds limit) {
  Store below = store;
  while (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(below.get()))
    below = prefixed->getUnderlyingStore();
  if (dynamic_cast<c10d::HashStore*>(below.get())) return store;
  Store copy = store->clone();
  copy->setTimeout(limit);
  return copy;
}

// Asks for a moment: a connection breaks just before its process is seen to be gone.
std::string soon(const std::function<std::string()>& trouble) {
  std::string known;
  for (int i = 0; trouble && known.empty() && i < 10; ++i) {
    if (i > 0) std::this_thread::sleep_for(milliseconds(20));  // Ends: after ten times
    known = trouble();
  }
  return known;
}

// Calls the store once. It gives up at the timeout.
template <typename Call>
auto call_within(const Store& store, milliseconds timeout, const std::string& what, Call call) {
  try {
    return call(*limited(store, timeout));
  } catch (const Error& failure) {  // gone, silent, or it refuses
    throw CodedError(exit_code(failure), formatted("{}: {}", what, failure.message()),
                     failure.hint());
  }
}

}  // namespace

bool await_keys(const Store& store, const std::vector<std::string>& keys, milliseconds timeout,
                const std::string& what, const std::function<std::string()>& trouble,
                const std::function<std::string()>& sign) {
  const Store asked = limited(store, kPatient);
  auto deadline = steady_clock::now() + timeout;
  std::string seen;
  for (;;) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    bool last = left <= kLook;
    try {
      asked->wait(keys, std::max(std::min(left, kLook), milliseconds(0)));
      return true;
    } catch (const StoreGone& gone) {
      const std::string known = soon(trouble);
      throw CodedError(kExitLostRank,
                       formatted("{}: {}", what, known.empty() ? gone.message() : known + "."),
                       gone.hint());
    } catch (const StoreTimeout&) {
    } catch (const StoreSilent&) {  // it may answer later; the timeout decides
    }
    if (sign) {
      if (std::string now = sign(); now != seen) {
        seen = std::move(now);
        deadline = steady_clock::now() + timeout;
        last = false;
      }
    }
    if (last) return false;
    const std::string known = trouble ? trouble() : "";
    if (known.empty()) continue;
    try {  // a rank that left may have answered first
      asked->wait(keys, milliseconds(0));
      return true;
    } catch (const Error&) {
      throw CodedError(kExitLostRank, formatted("{}: {}.", what, known),
                       "see what that rank printed last.");
    }
  }
}

void put(const Store& store, const std::string& key, const std::string& value, milliseconds timeout,
         const std::string& what) {
  call_within(store, timeout, what, [&](c10d::Store& bounded) { bounded.set(key, value); });
}

std::string fetch(const Store& store, const std::string& key, milliseconds timeout,
                  const std::string& what, const std::function<std::string()>& trouble) {
  if (!await_keys(store, {key}, timeout, what, trouble))
    throw CodedError(kExitLostRank,
                     formatted("{}: no answer in {:g} s.", what,
                               static_cast<double>(timeout.count()) / 1000),
                     "check whether that process is running and what it printed; FSDP_TIMEOUT "
                     "(seconds) allows more time.");
  return call_within(store, kPatient, what,
                     [&](c10d::Store& bounded) { return bounded.get_to_str(key); });
}

void await_ranks(const Store& store, const std::string& prefix, int size, milliseconds timeout,
                 const std::string& what, const std::function<std::string()>& trouble) {
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(formatted("{}/{}", prefix, r));
  if (await_keys(store, keys, timeout, what, trouble)) return;
  std::string missing;
  int absent = 0;
  for (int r = 0; r < size; ++r) {
    if (await_keys(store, {keys[r]}, milliseconds(0), what)) continue;
    if (++absent <= 16) missing += (absent > 1 ? ", " : "") + std::to_string(r);
  }
  if (absent == 0) return;
  if (absent > 16) missing += ", …";
  throw CodedError(
      kExitLostRank,
      formatted("{}: {} of {} ranks didn't join within {} s: rank {}.", what, absent, size,
                timeout.count() / 1000, missing),
      "check whether those processes are running and what they printed; every rank must create "
      "the same communicators in the same order. FSDP_TIMEOUT (seconds) allows more time.");
}

BoundedStore::BoundedStore(const Store& store)
    : patient_(limited(store, kPatient)), brief_(limited(store, kBrief)) {}

template <typename Call>
auto BoundedStore::ask(const Call& call) {
  try {
    auto answer = call(silent_ ? *brief_ : *patient_);
    silent_ = false;
    return answer;
  } catch (const StoreSilent&) {
    silent_ = true;
    throw;
  }
}

void BoundedStore::set(const std::string& key, const std::string& value) {
  ask([&](c10d::Store& store) { return store.set(key, value), true; });
}

void BoundedStore::set_if_absent(const std::string& key, const std::string& value) {
  ask([&](c10d::Store& store) { return store.compareSet(key, "", value); });
}

std::optional<std::string> BoundedStore::get(const std::string& key) {
  return ask([&](c10d::Store& store) -> std::optional<std::string> {
    if (!store.check({key})) return std::nullopt;
    return store.get_to_str(key);
  });
}

int64_t BoundedStore::add(const std::string& key, int64_t amount) {
  return ask([&](c10d::Store& store) { return store.add(key, amount); });
}

void BoundedStore::erase(const std::string& key) {
  ask([&](c10d::Store& store) { return store.deleteKey(key); });
}

shm::Exchange exchange_over(Store store, const std::string& what,
                            std::function<std::string()> trouble) {
  return {[store](const std::string& key, const std::string& value) { store->set(key, value); },
          [store, what, trouble](const std::string& key, milliseconds timeout) {
            if (!await_keys(store, {key}, timeout, what, trouble)) {
              std::string who = key.substr(0, 5) == "host/" ? "rank " + key.substr(5) : "rank 0";
              throw CodedError(
                  kExitLostRank,
                  formatted("{}: {} didn't join within {} s.", what, who, timeout.count() / 1000),
                  "check whether that process is running and what it printed; every rank must "
                  "create the same communicators in the same order.");
            }
            return fetch(store, key, timeout, what, trouble);
          },
          trouble};
}

}  // namespace fsdp::comm
