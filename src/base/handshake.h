// Handshake: two processes of a run prove to each other that they know its secret. Neither reads
// anything else from a connection before.
//
//   caller → listener   kGreeting, a nonce                        40 bytes
//   listener → caller   kGreeting, a nonce, the listener's proof  72 bytes
//   caller → listener   the caller's proof                     32 bytes
//
// A proof is HMAC-SHA-256 by the secret over the prover's role, the context and both nonces, so it
// is good for this connection only and can't be sent back to its author. The listener's comes
// first: a caller never talks to a false listener. The context says what the connection is for.
// Without a secret ("") both sides still learn whether they are of one version and context.
//
// It only sees bytes: its owner sends and receives them, with a deadline.
#pragma once

#include <string>
#include <string_view>

#include "base/namespace.h"

namespace fsdp::base {

class Handshake {
 public:
  enum class Role { kCaller, kListener };
  Handshake(Role role, std::string secret, std::string context);

  // Takes what it needs from the beginning of `received`.
  void take(std::string& received);
  // What to send now; "": nothing.
  std::string outgoing();

  bool done() const { return done_; }  // the other side has proven the secret
  // Why the other side is refused, as the end of a sentence that begins with it; "": it isn't.
  const std::string& problem() const { return problem_; }

 private:
  std::string proof(Role role) const;
  bool takes_nonce(std::string& received);
  bool takes_proof(std::string& received);

  const Role role_;
  const std::string secret_, context_, nonce_;
  std::string theirs_;  // the other side's nonce
  std::string outgoing_;
  bool done_ = false;
  std::string problem_;
};

}  // namespace fsdp::base
