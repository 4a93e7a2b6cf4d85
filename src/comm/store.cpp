#include "comm/store.h"

#include <algorithm>
#include <future>
#include <thread>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::comm {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

bool await_keys(const Store& store, const std::vector<std::string>& keys, milliseconds timeout,
                const std::string& what, const std::function<std::string()>& trouble) {
  BoundedStore bounded(store);
  auto deadline = steady_clock::now() + timeout, looked = steady_clock::now();
  milliseconds pause(1);
  for (;;) {
    try {
      if (bounded.has(keys)) return true;
    } catch (const std::exception&) {
      if (bounded.gone())
        throw Error(formatted("{}: the rendezvous store is gone: the process that holds it (rank "
                              "0, or torchrun's agent) died.",
                              what),
                    "see what that process printed last.");
    }
    auto now = steady_clock::now();
    if (trouble && now - looked > milliseconds(300)) {
      looked = now;
      // A rank that left may have answered first.
      if (std::string known = trouble(); !known.empty() && !bounded.has(keys))
        throw Error(formatted("{}: {}.", what, known), "see what that rank printed last.");
    }
    auto left = std::chrono::duration_cast<milliseconds>(deadline - now);
    if (left.count() <= 0) return false;
    std::this_thread::sleep_for(std::min(left, pause));
    pause = std::min(pause * 2, milliseconds(100));
  }
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
  throw Error(
      formatted("{}: {} of {} ranks didn't join within {} s: rank {}.", what, absent, size,
                timeout.count() / 1000, missing),
      "check whether those processes are running and what they printed; every rank must create "
      "the same communicators in the same order. FSDP_TIMEOUT (seconds) allows more time.");
}

template <typename Result>
Result BoundedStore::call(std::function<Result(c10d::Store&)> body) {
  constexpr std::chrono::seconds kLimit{2};
  if (state_->gone) throw std::runtime_error("the store is gone");
  if (state_->silent || !state_->free.try_acquire_for(kLimit))
    throw std::runtime_error("the store does not answer");
  auto task = std::make_shared<std::packaged_task<Result()>>([state = state_, body] {
    struct Release {
      State& state;
      ~Release() {
        state.silent = false;
        state.free.release();
      }
    } release{*state};
    try {
      return body(*state->store);
    } catch (...) {
      state->gone = true;
      throw;
    }
  });
  auto result = task->get_future();
  try {
    std::thread([task] { (*task)(); }).detach();  // may outlive us; it owns all it needs
  } catch (...) {
    state_->free.release();
    throw;
  }
  if (result.wait_for(kLimit) != std::future_status::ready) {
    state_->silent = true;
    if (result.wait_for(std::chrono::seconds(0)) != std::future_status::ready)
      throw std::runtime_error("the store does not answer");
    state_->silent = false;
  }
  return result.get();
}

void BoundedStore::set(const std::string& key, const std::string& value) {
  call<void>([=](c10d::Store& store) { store.set(key, value); });
}

void BoundedStore::set_if_absent(const std::string& key, const std::string& value) {
  call<void>([=](c10d::Store& store) { store.compareSet(key, "", value); });
}

std::optional<std::string> BoundedStore::get(const std::string& key) {
  return call<std::optional<std::string>>([=](c10d::Store& store) -> std::optional<std::string> {
    if (!store.check({key})) return std::nullopt;
    return store.get_to_str(key);
  });
}

bool BoundedStore::has(const std::vector<std::string>& keys) {
  return call<bool>([=](c10d::Store& store) { return store.check(keys); });
}

int64_t BoundedStore::add(const std::string& key, int64_t amount) {
  return call<int64_t>([=](c10d::Store& store) { return store.add(key, amount); });
}

void BoundedStore::erase(const std::string& key) {
  call<void>([=](c10d::Store& store) { store.deleteKey(key); });
}

shm::Exchange exchange_over(Store store, const std::string& what,
                            std::function<std::string()> trouble) {
  return {[store](const std::string& key, const std::string& value) { store->set(key, value); },
          [store, what, trouble](const std::string& key, milliseconds timeout) {
            if (!await_keys(store, {key}, timeout, what, trouble)) {
              std::string who = key.substr(0, 5) == "host/" ? "rank " + key.substr(5) : "rank 0";
              throw Error(
                  formatted("{}: {} didn't join within {} s.", what, who, timeout.count() / 1000),
                  "check whether that process is running and what it printed; every rank must "
                  "create the same communicators in the same order.");
            }
            return store->get_to_str(key);
          },
          trouble};
}

}  // namespace fsdp::comm
