#include "base/handshake.h"

#include <algorithm>
#include <utility>

#include "base/secret.h"
#include "base/sha256.h"

namespace fsdp::base {
namespace {

constexpr std::string_view kGreeting = "fsdp/1\r\n";  // the number changes with the protocol
constexpr size_t kNonceBytes = 32;

}  // namespace

Handshake::Handshake(Role role, std::string secret, std::string context)
    : role_(role),
      secret_(std::move(secret)),
      context_(std::move(context)),
      nonce_(secret::random_bytes(kNonceBytes)) {
  if (role_ == Role::kCaller) outgoing_.append(kGreeting).append(nonce_);
}

std::string Handshake::proof(Role role) const {
  const bool caller = role_ == Role::kCaller;
  std::string said = role == Role::kCaller ? "caller" : "listener";
  said += '\0';
  said.append(context_) += '\0';
  said.append(caller ? nonce_ : theirs_).append(caller ? theirs_ : nonce_);
  return hmac_sha256(secret_, said);
}

// Refuses a wrong byte as soon as it is there, so that other programs learn it at once.
bool Handshake::takes_nonce(std::string& received) {
  const size_t known = std::min(received.size(), kGreeting.size());
  if (std::string_view(received).substr(0, known) != kGreeting.substr(0, known)) {
    problem_ = "speaks another protocol: it is another program, or another version of fsdp";
    return false;
  }
  if (received.size() < kGreeting.size() + kNonceBytes) return false;
  theirs_ = received.substr(kGreeting.size(), kNonceBytes);
  received.erase(0, kGreeting.size() + kNonceBytes);
  return true;
}

bool Handshake::takes_proof(std::string& received) {
  if (received.size() < kSha256Bytes) return false;
  const Role other = role_ == Role::kCaller ? Role::kListener : Role::kCaller;
  done_ = equal_in_constant_time(std::string_view(received).substr(0, kSha256Bytes), proof(other));
  if (!done_) problem_ = "doesn't know the secret of this run, or belongs to another one";
  received.erase(0, kSha256Bytes);
  return done_;
}

void Handshake::take(std::string& received) {
  if (done_ || !problem_.empty()) return;
  const bool caller = role_ == Role::kCaller;
  if (theirs_.empty()) {
    if (!takes_nonce(received)) return;
    if (!caller) outgoing_.append(kGreeting).append(nonce_).append(proof(Role::kListener));
  }
  if (takes_proof(received) && caller) outgoing_ += proof(Role::kCaller);
}

std::string Handshake::outgoing() {
  return std::exchange(outgoing_, "");
}

}  // namespace fsdp::base
