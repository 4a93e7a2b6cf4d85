#include "comm/store_message.h"

namespace fsdp::comm {
namespace {

void put(std::string& out, uint64_t number, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) out += static_cast<char>(number >> (8 * i));
}

uint64_t number_at(std::string_view text, size_t bytes) {
  uint64_t number = 0;
  for (size_t i = bytes; i-- > 0;) number = number << 8 | static_cast<uint8_t>(text[i]);
  return number;
}

// nullopt: the text is too short.
std::optional<uint64_t> take(std::string_view& text, size_t bytes) {
  if (text.size() < bytes) return std::nullopt;
  const uint64_t number = number_at(text, bytes);
  text.remove_prefix(bytes);
  return number;
}

std::string framed(uint8_t kind, uint64_t wait_ms, const std::vector<std::string>& fields) {
  std::string body;
  put(body, kind, 1);
  put(body, wait_ms, 8);
  for (const auto& field : fields) {
    put(body, field.size(), kLengthBytes);
    body += field;
  }
  std::string message;
  put(message, body.size(), kLengthBytes);
  return message += body;
}

std::optional<std::vector<std::string>> take_fields(std::string_view text) {
  std::vector<std::string> fields;
  while (!text.empty()) {
    const auto length = take(text, kLengthBytes);
    if (!length || *length > text.size()) return std::nullopt;
    fields.emplace_back(text.substr(0, *length));
    text.remove_prefix(*length);
  }
  return fields;
}

// How many fields a request has; kGet, kWait and kCheck have any number.
bool fits(const StoreRequest& request) {
  const size_t count = request.fields.size();
  switch (request.call) {
    case StoreCall::kCompareSet:
      return count == 3;
    case StoreCall::kSet:
    case StoreCall::kAppend:
    case StoreCall::kAdd:
      return count == 2;
    case StoreCall::kDelete:
      return count == 1;
    case StoreCall::kGet:
    case StoreCall::kWait:
    case StoreCall::kCheck:
      return true;
    case StoreCall::kCount:
    case StoreCall::kList:
      return count == 0;
  }
  return false;
}

}  // namespace

std::string encode(const StoreRequest& request) {
  return framed(static_cast<uint8_t>(request.call), request.wait_ms, request.fields);
}

std::string encode(const StoreAnswer& answer) {
  return framed(answer.kind, 0, answer.fields);
}

std::optional<StoreRequest> decode_request(std::string_view text) {
  const auto call = take(text, 1), wait_ms = take(text, 8);
  auto fields = take_fields(text);
  if (!call || !wait_ms || !fields) return std::nullopt;
  StoreRequest request{static_cast<StoreCall>(*call), *wait_ms, std::move(*fields)};
  if (!fits(request)) return std::nullopt;
  return request;
}

std::optional<StoreAnswer> decode_answer(std::string_view text) {
  const auto kind = take(text, 1), unused = take(text, 8);
  auto fields = take_fields(text);
  if (!kind || !unused || *unused != 0 || !fields || *kind < StoreAnswer::kDone ||
      *kind > StoreAnswer::kRefused)
    return std::nullopt;
  return StoreAnswer{static_cast<StoreAnswer::Kind>(*kind), std::move(*fields)};
}

std::optional<std::string> take_message(std::string& received, bool& too_long) {
  if (received.size() < kLengthBytes) return std::nullopt;
  const uint64_t length = number_at(received, kLengthBytes);
  too_long = length > kMostMessage;
  if (too_long || received.size() - kLengthBytes < length) return std::nullopt;
  std::string message = received.substr(kLengthBytes, length);
  received.erase(0, kLengthBytes + length);
  return message;
}

}  // namespace fsdp::comm
