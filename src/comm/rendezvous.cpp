#include "comm/rendezvous.h"

#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <future>
#include <optional>
#include <sstream>
#include <thread>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/process.h"
#include "base/log.h"
#include "base/secret.h"
#include "base/sha256.h"
#include "base/sockets.h"
#include "comm/modules.h"
#include "comm/store_client.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// --- rank 0's side ---

[[noreturn]] void fail_to_open(const StoreAddress& address, const std::string& why) {
  throw Error(
      formatted("rank 0 could not open the store at {}: {}.", address.text(), why),
      address.unix_name.empty()
          ? "another program may be using the port: set MASTER_PORT to a free one, or use "
            "fsdp run."
          : "another run on this host may have the same MASTER_PORT or job id: wait until it "
            "ends, or set another MASTER_PORT.");
}

std::string holder_of(const std::string& unix_name) {
  int problem = 0;
  const auto other = sockets::connect_unix(unix_name, problem);
  if (!other) return "another process has that name";
  const auto owner = sockets::owner_of(other);
  return formatted("process {} of user {} has that name", owner.pid, owner.user);
}

// Listens at the address; a port of 0 becomes the one that it got.
std::shared_ptr<StoreServer> open_store(StoreAddress& address, int ranks) {
  StoreServerOptions options;
  int problem = 0;
  options.one_user = !address.unix_name.empty();
  if (options.one_user) {
    options.listener = sockets::listen_unix(address.unix_name, problem);
    if (problem == EADDRINUSE) fail_to_open(address, holder_of(address.unix_name));
  } else {
    options.listener = sockets::bind_tcp(address.port, problem);
    if (options.listener && listen(options.listener.get(), SOMAXCONN) != 0) {
      problem = errno;
      options.listener.close();
    }
  }
  if (!options.listener) fail_to_open(address, std::strerror(problem));
  if (!options.one_user) address.port = sockets::port_of(options.listener);
  options.secret = address.secret;
  options.context = address.context;
  options.ranks = ranks;
  return std::make_shared<StoreServer>(std::move(options));
}

void warn_without_secret(const LaunchEnvironment& launch) {
  if (launch.rank != 0 || launch.launcher == "fsdp run") return;  // that has said so
  log::warn(
      "the ranks have no secret, so anyone who reaches rank 0's store can disturb this run: set "
      "FSDP_SECRET, or FSDP_SECRET_FILE, on every node (docs/security.md).");
}

// --- addresses that rank 0 passes on ---

// "unix NAME SECRET" or "tcp HOST PORT SECRET"; the secret is left out where others could read it.
std::string passed_on(const StoreAddress& address, bool with_secret) {
  std::string text = address.unix_name.empty() ? formatted("tcp {} {}", address.host, address.port)
                                               : formatted("unix {}", address.unix_name);
  return with_secret ? text + " " + address.secret : text;
}

StoreAddress read_address(const std::string& text, const std::string& context,
                          const std::string& from) {
  std::istringstream words(text);
  std::string kind, port, rest;
  StoreAddress address{.context = context};
  words >> kind;
  if (kind == "unix") {
    words >> address.unix_name;
  } else if (kind == "tcp") {
    words >> address.host >> port;
    const auto [end, problem] =
        std::from_chars(port.data(), port.data() + port.size(), address.port);
    if (problem != std::errc() || end != port.data() + port.size())
      words.setstate(std::ios::failbit);
  }
  const bool found =
      words && (kind == "unix" || kind == "tcp") && address.port >= 0 && address.port < 65536;
  words >> address.secret;
  if (!found || words >> rest)
    throw Error(formatted("{} gave no address of rank 0's store.", from),
                "all ranks must run the same version of fsdp.");
  return address;
}

// A new address on this host: a name that nobody can guess, or a free port.
StoreAddress new_address(const LaunchEnvironment& launch, const std::string& context) {
  StoreAddress address{.context = context};
  if (launch.one_host)
    address.unix_name = "fsdp-" + to_hex(secret::random_bytes(16));
  else
    address.host = launch.master_host.empty() ? host_name() : launch.master_host;
  return address;
}

// --- the ways to a store ---

struct Meeting {
  const LaunchEnvironment& launch;
  std::string context;
  milliseconds timeout;

  Store open(StoreAddress address) const {
    auto server = open_store(address, launch.size);
    if (address.unix_name.empty()) address.host = "localhost";
    return StoreClient::connect(std::move(address), std::move(server), 0, timeout);
  }
  Store reach(StoreAddress address) const {
    return StoreClient::connect(std::move(address), nullptr, launch.rank, timeout);
  }

  Store over_mpi() const;
  Store over_agent() const;
  Store directly() const;
};

// MPI carries the address and a secret: only processes that mpirun has started are in it.
Store Meeting::over_mpi() const {
  StoreAddress address = new_address(launch, context);
  std::shared_ptr<StoreServer> server;
  std::string text;
  if (launch.rank == 0) {
    address.secret = secret::random();
    server = open_store(address, launch.size);
    text = passed_on(address, /*with_secret=*/true);
  }
  text = require_module("mpi")->agree(text, launch.rank, launch.size);
  if (launch.rank != 0) address = read_address(text, context, "MPI");
  if (launch.rank == 0) address.host = "localhost";
  return StoreClient::connect(std::move(address), std::move(server), launch.rank, timeout);
}

// What rank 0 writes on torchrun's board. c10d's calls may wait for a stopped agent without end, so
// they run in a thread that may be left behind.
std::string through_agent(const LaunchEnvironment& launch, const std::string& key,
                          const std::string& mine, milliseconds timeout) {
  auto task = std::make_shared<std::packaged_task<std::string()>>(
      [host = launch.master_host, port = launch.master_port, rank = launch.rank, key, mine,
       timeout]() -> std::string {
        c10d::TCPStoreOptions options;
        options.port = static_cast<uint16_t>(port);
        options.waitWorkers = false;
        options.timeout = timeout;
        const Store board = c10::make_intrusive<c10d::TCPStore>(host, options);
        if (rank == 0) {
          board->set(key, mine);
          return mine;
        }
        const auto deadline = steady_clock::now() + timeout;
        while (!board->check({key}) && steady_clock::now() < deadline)
          std::this_thread::sleep_for(milliseconds(10));  // Ends: at the deadline
        return board->check({key}) ? board->get_to_str(key) : "";
      });
  auto answer = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  const std::string where = formatted("{}:{}", launch.master_host, launch.master_port);
  std::string why = "the agent doesn't answer";
  if (answer.wait_for(timeout + milliseconds(500)) == std::future_status::ready) {
    try {
      if (const std::string text = answer.get(); !text.empty()) return text;
      why = "rank 0 wrote no address there";
    } catch (const std::exception& failure) {
      why = failure.what();
      why = why.substr(0, why.find('\n'));
    }
  }
  throw CodedError(
      kExitLostRank,
      formatted("rank {} could not reach the store of torchrun's agent at {} in {} s: {}.",
                launch.rank, where, timeout.count() / 1000, why),
      "check that torchrun is running, and that the address can be reached from this host. "
      "FSDP_TIMEOUT (seconds) allows more time.");
}

// torchrun's store takes connections from anyone, so it gets the address and no secret.
Store Meeting::over_agent() const {
  StoreAddress address = new_address(launch, context);
  address.secret = secret::of_environment();
  if (address.unix_name.empty() && address.secret.empty()) warn_without_secret(launch);
  std::shared_ptr<StoreServer> server;
  if (launch.rank == 0) server = open_store(address, launch.size);
  const std::string text =
      through_agent(launch, "fsdp/" + context, passed_on(address, /*with_secret=*/false), timeout);
  if (launch.rank == 0) {
    address.host = "localhost";
  } else {
    const std::string known = address.secret;
    address = read_address(text, context, "torchrun's agent");
    address.secret = known;
  }
  return StoreClient::connect(std::move(address), std::move(server), launch.rank, timeout);
}

// Every rank knows the address.
Store Meeting::directly() const {
  StoreAddress address{.context = context};
  address.secret = secret::of_environment();
  if (launch.one_host) {
    const std::string run =
        formatted("{}\n{}\n{}\n{}", geteuid(), launch.launcher, launch.job, launch.master_port);
    address.unix_name = formatted("fsdp-{}/{}", to_hex(sha256(run)).substr(0, 32), context);
  } else {
    if (launch.master_host.empty() || launch.master_port == 0)
      throw Error(
          formatted("the ranks of {} run on several hosts, but the address of rank 0 isn't known.",
                    launch.launcher),
          "set MASTER_ADDR and MASTER_PORT (mpirun -x MASTER_ADDR -x MASTER_PORT), or use "
          "the mpi backend.");
    address.host = launch.master_host;
    address.port = launch.master_port;
    if (address.secret.empty()) warn_without_secret(launch);
  }
  return launch.rank == 0 ? open(std::move(address)) : reach(std::move(address));
}

}  // namespace

Store rendezvous(const LaunchEnvironment& launch, bool over_mpi, milliseconds timeout) {
  // No connection may come from a rank of an earlier start, or of an earlier world of this process.
  // Ranks that stayed when others were replaced have had more worlds than those, but not in this
  // attempt.
  static std::atomic<int> worlds{0}, attempt{0};
  if (attempt.exchange(launch.attempt) != launch.attempt) worlds = 0;
  const Meeting meeting{launch, formatted("store/{}/{}", launch.attempt, worlds++), timeout};
  if (launch.size == 1) return c10::make_intrusive<c10d::HashStore>();
  if (over_mpi) return meeting.over_mpi();
  return launch.agent_store ? meeting.over_agent() : meeting.directly();
}

}  // namespace fsdp::comm
