#include "comm/rendezvous.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include "comm/modules.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

using std::chrono::milliseconds;

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

Store open_store(const std::string& host, int port, bool server, int rank, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.isServer = server;
  options.waitWorkers = false;  // we wait ourselves, and can say for whom
  options.timeout = timeout;
  try {
    return c10::make_intrusive<c10d::TCPStore>(host, options);
  } catch (const std::exception& failure) {
    std::string where = host + ":" + std::to_string(port);
    std::string reason = failure.what();
    reason = reason.substr(0, reason.find('\n'));
    if (server)
      throw Error("rank " + std::to_string(rank) + " could not open the store at " + where + ": " +
                      reason,
                  "another program may have the port: set MASTER_PORT to a free one (fsdp run finds "
                  "one by itself).");
    throw Error("rank " + std::to_string(rank) + " could not reach the store of rank 0 at " + where +
                    " in " + std::to_string(timeout.count() / 1000) + " s: " + reason,
                "see whether rank 0 runs, and whether MASTER_ADDR and MASTER_PORT (" + where +
                    ") can be reached from this host. FSDP_TIMEOUT (seconds) allows more time.");
  }
}

}  // namespace

Store rendezvous(const LaunchEnvironment& launch, bool over_mpi, milliseconds timeout) {
  Store store;
  if (launch.size == 1 && launch.launcher == "none") {
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
      address = host + ":" + std::to_string(static_cast<c10d::TCPStore&>(*own).getPort());
    }
    address = require_module("mpi").agree(address, launch.size);
    size_t colon = address.rfind(':');
    store = launch.rank == 0 ? own
                             : open_store(address.substr(0, colon),
                                          std::stoi(address.substr(colon + 1)), false, launch.rank,
                                          timeout);
  } else {
    if (launch.master_host.empty() || launch.master_port == 0)
      throw Error("the ranks of " + launch.launcher + " run on several hosts, and nobody said where "
                      "rank 0 is.",
                  "set MASTER_ADDR and MASTER_PORT (mpirun -x MASTER_ADDR -x MASTER_PORT), or use "
                  "the mpi backend.");
    bool server = launch.rank == 0 && !launch.agent_store;
    store = open_store(launch.master_host, launch.master_port, server, launch.rank, timeout);
  }
  return c10::make_intrusive<c10d::PrefixStore>("fsdp/" + std::to_string(launch.attempt), store);
}

}  // namespace fsdp::comm
