// The store: an odd first byte begins what a rank sends to it, requests in their frames; an even
// one what a stranger sends before anything else is read, the handshake, to either side.
#include <cstdlib>

#include "base/handshake.h"
#include "comm/store_table.h"

namespace comm = fsdp::comm;

namespace {

void serve(std::string received) {
  comm::StoreTable table;
  bool too_long = false;
  while (const auto message = comm::take_message(received, too_long)) {
    if (const auto answer = comm::decode_answer(*message))
      if (comm::encode(*answer).size() < comm::kLengthBytes + 9) std::abort();
    const auto request = comm::decode_request(*message);
    if (!request) continue;
    if (comm::encode(*request).substr(comm::kLengthBytes) != *message) std::abort();
    const auto answer = table.answer(*request);
    if (answer && comm::encode(*answer).size() > comm::kLengthBytes + comm::kMostMessage)
      std::abort();
    if (!answer && !table.missing_key(request->fields)) std::abort();
  }
}

void meet(const std::string& bytes) {
  using fsdp::base::Handshake;
  for (const auto role : {Handshake::Role::kCaller, Handshake::Role::kListener}) {
    Handshake whole(role, "a secret of some length", "context"),
        parts(role, "a secret of some length", "context");
    std::string received = bytes;
    whole.take(received);
    std::string part;
    for (const char byte : bytes) {
      part += byte;
      parts.take(part);
    }
    if (whole.done() || parts.done()) std::abort();  // nobody guesses a proof
    if (whole.problem() != parts.problem()) std::abort();
    if (whole.outgoing().size() != parts.outgoing().size()) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  if (data[0] & 1)
    serve(bytes);
  else
    meet(bytes);
  return 0;
}
