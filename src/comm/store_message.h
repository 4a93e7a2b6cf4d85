// What a rank asks the store, what the store answers, and how both look on a connection: the length
// of the rest in 4 bytes, then the fields. A rank asks again only when it has its answer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::comm {

inline constexpr size_t kMostMessage = 8 << 20;  // bytes of one request or answer
inline constexpr size_t kLengthBytes = 4;

enum class StoreCall : uint8_t {
  kSet = 1,     // key, value
  kCompareSet,  // key, expected, desired → the value it has now
  kAppend,      // key, value
  kAdd,         // key, number → sum
  kDelete,      // key → "1" or "0"
  kGet,         // keys → values; waits for them
  kWait,        // keys; waits for them
  kCheck,       // keys → "1" or "0"
  kCount,       // → number of keys
  kList,        // → keys
};

struct StoreRequest {
  StoreCall call = StoreCall::kCheck;
  uint64_t wait_ms = 0;  // for kGet and kWait
  std::vector<std::string> fields;
};

struct StoreAnswer {
  enum Kind : uint8_t { kDone = 1, kTimeout, kRefused } kind = kDone;
  std::vector<std::string> fields;  // of kRefused: why
};

// With the length in front.
std::string encode(const StoreRequest& request);
std::string encode(const StoreAnswer& answer);

// Without it; nullopt unless the text is exactly a message.
std::optional<StoreRequest> decode_request(std::string_view text);
std::optional<StoreAnswer> decode_answer(std::string_view text);

// Takes the first whole message from `received`, without its length; nullopt: it isn't complete.
// `too_long`: its length is beyond kMostMessage.
std::optional<std::string> take_message(std::string& received, bool& too_long);

}  // namespace fsdp::comm
