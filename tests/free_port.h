// A port for a program that a test starts.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace fsdp {

// Free now, and below those that systems give to whoever asks for any: until the program listens,
// no connection of another test gets it. Processes begin at different ones.
inline int free_port() {
  constexpr int kFirst = 10'000, kCount = 20'000;
  static int tried = getpid() * 16;
  for (int left = kCount; left > 0; --left) {
    const int port = kFirst + tried++ % kCount;
    const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    const bool bound = bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    close(socket);
    if (bound) return port;
  }
  return 0;
}

}  // namespace fsdp
