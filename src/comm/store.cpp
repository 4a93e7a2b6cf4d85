#include "comm/store.h"

#include <algorithm>
#include <future>
#include <thread>

#include "fsdp/error.h"

namespace fsdp::comm {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

bool await_keys(c10d::Store& store, const std::vector<std::string>& keys, milliseconds timeout) {
  auto deadline = steady_clock::now() + timeout;
  milliseconds pause(1);
  while (!store.check(keys)) {
    auto left = std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now());
    if (left.count() <= 0) return false;
    std::this_thread::sleep_for(std::min(left, pause));
    pause = std::min(pause * 2, milliseconds(100));
  }
  return true;
}

void await_ranks(c10d::Store& store, const std::string& prefix, int size, milliseconds timeout,
                 const std::string& what) {
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(prefix + "/" + std::to_string(r));
  if (await_keys(store, keys, timeout)) return;
  std::string missing;
  int absent = 0;
  for (int r = 0; r < size; ++r) {
    if (store.check({keys[r]})) continue;
    if (++absent <= 16) missing += (absent > 1 ? ", " : "") + std::to_string(r);
  }
  if (absent == 0) return;
  if (absent > 16) missing += ", …";
  throw Error(
      what + ": " + std::to_string(absent) + " of " + std::to_string(size) +
          " ranks did not come in " + std::to_string(timeout.count() / 1000) + " s: rank " +
          missing + ".",
      "see whether those processes run and what they printed; every rank must make the same "
      "communicators in the same order. FSDP_TIMEOUT (seconds) allows more time.");
}

template <typename Result>
Result BoundedStore::call(std::function<Result(c10d::Store&)> body) {
  constexpr std::chrono::seconds kLimit{2};
  if (state_->gone) throw std::runtime_error("the store is gone");
  if (!state_->free.try_acquire_for(kLimit)) throw std::runtime_error("the store does not answer");
  auto task = std::make_shared<std::packaged_task<Result()>>([state = state_, body] {
    struct Release {
      State& state;
      ~Release() { state.free.release(); }
    } release{*state};
    try {
      return body(*state->store);
    } catch (...) {
      state->gone = true;
      throw;
    }
  });
  auto result = task->get_future();
  std::thread([task] { (*task)(); }).detach();  // may outlive us, with all it needs
  if (result.wait_for(kLimit) != std::future_status::ready)
    throw std::runtime_error("the store does not answer");
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

int64_t BoundedStore::add(const std::string& key, int64_t amount) {
  return call<int64_t>([=](c10d::Store& store) { return store.add(key, amount); });
}

void BoundedStore::erase(const std::string& key) {
  call<void>([=](c10d::Store& store) { store.deleteKey(key); });
}

shm::Exchange exchange_over(Store store, const std::string& what) {
  return {[store](const std::string& key, const std::string& value) { store->set(key, value); },
          [store, what](const std::string& key, milliseconds timeout) {
            if (!await_keys(*store, {key}, timeout)) {
              std::string who = key.substr(0, 5) == "host/" ? "rank " + key.substr(5) : "rank 0";
              throw Error(
                  what + ": " + who + " did not come in " + std::to_string(timeout.count() / 1000) +
                      " s.",
                  "see whether that process runs and what it printed; every rank must make the "
                  "same communicators in the same order.");
            }
            return store->get_to_str(key);
          }};
}

}  // namespace fsdp::comm
