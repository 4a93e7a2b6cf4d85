#include "comm/rendezvous.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/format.h"
#include "comm/modules.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

// Waits until a process listens there; returns "" or why none does. c10d's own retries each log a
// stack trace.
std::string await_listener(const std::string& host, int port, milliseconds timeout) {
  auto deadline = steady_clock::now() + timeout;
  std::string why;
  do {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    int problem = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (problem) why = gai_strerror(problem);
    for (addrinfo* address = found; address; address = address->ai_next) {
      int fd = socket(address->ai_family, address->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
      int error = connect(fd, address->ai_addr, address->ai_addrlen) == 0 ? 0 : errno;
      pollfd waiting{fd, POLLOUT, 0};
      if (error == EINPROGRESS) {
        socklen_t length = sizeof error;
        error = poll(&waiting, 1, 1000) == 1 ? 0 : ETIMEDOUT;
        if (!error) getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
      }
      close(fd);
      if (error == 0) {
        freeaddrinfo(found);
        return "";
      }
      why = std::strerror(error);
    }
    if (found) freeaddrinfo(found);
    std::this_thread::sleep_for(milliseconds(20));
  } while (steady_clock::now() < deadline);
  return why;
}

Store open_store(const std::string& host, int port, bool server, int rank, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.isServer = server;
  options.waitWorkers = false;  // we wait ourselves, and can name who is missing
  options.timeout = timeout;
  const std::string where = formatted("{}:{}", host, port);
  std::string why;
  if (!server) why = await_listener(host, port, timeout);
  try {
    if (why.empty()) return c10::make_intrusive<c10d::TCPStore>(host, options);
  } catch (const std::exception& failure) {
    why = failure.what();
    why = why.substr(0, why.find('\n'));
  }
  if (server)
    throw Error(
        formatted("rank {} could not open the store at {}: {}.", rank, where, why),
        "another program may be using the port: set MASTER_PORT to a free one (fsdp run finds "
        "one itself).");
  throw Error(formatted("rank {} could not reach the store of rank 0 at {} in {} s: {}.", rank,
                        where, timeout.count() / 1000, why),
              formatted("check that rank 0 is running, and that MASTER_ADDR and MASTER_PORT ({}) "
                        "are reachable from this host. FSDP_TIMEOUT (seconds) allows more time.",
                        where));
}

}  // namespace

Store rendezvous(const LaunchEnvironment& launch, bool over_mpi, milliseconds timeout) {
  Store store;
  if (launch.size == 1 && (launch.master_host.empty() || launch.master_port == 0)) {
    store = c10::make_intrusive<c10d::HashStore>();
  } else if (over_mpi) {
    // Rank 0 opens a free port and tells the others through MPI.
    Store own;
    std::string address;
    if (launch.rank == 0) {
      own = open_store("localhost", 0, true, 0, timeout);
      bool one_node = launch.local_size == launch.size;
      std::string host = !launch.master_host.empty() ? launch.master_host
                         : one_node                  ? "127.0.0.1"
                                                     : host_name();
      address = formatted("{}:{}", host, static_cast<c10d::TCPStore&>(*own).getPort());
    }
    address = require_module("mpi")->agree(address, launch.rank, launch.size);
    size_t colon = address.rfind(':');
    store = launch.rank == 0
                ? own
                : open_store(address.substr(0, colon), std::stoi(address.substr(colon + 1)), false,
                             launch.rank, timeout);
  } else {
    if (launch.master_host.empty() || launch.master_port == 0)
      throw Error(
          formatted("the ranks of {} run on several hosts, but the address of rank 0 isn't known.",
                    launch.launcher),
          "set MASTER_ADDR and MASTER_PORT (mpirun -x MASTER_ADDR -x MASTER_PORT), or use "
          "the mpi backend.");
    bool server = launch.rank == 0 && !launch.agent_store;
    store = open_store(launch.master_host, launch.master_port, server, launch.rank, timeout);
  }
  // A store that outlives a world (torchrun's agent) must not show the previous world's keys.
  static std::atomic<int> worlds{0};
  return c10::make_intrusive<c10d::PrefixStore>(formatted("fsdp/{}/{}", launch.attempt, worlds++),
                                                store);
}

}  // namespace fsdp::comm
