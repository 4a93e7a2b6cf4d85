#include "comm/store_client.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include "base/format.h"
#include "base/handshake.h"
#include "base/mutex.h"

namespace fsdp::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kAnswer{2000};  // beyond the end of a wait
constexpr size_t kReadSize = 64 << 10;

std::string text_of(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

std::vector<uint8_t> bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

int64_t number_of(const std::string& text) {
  int64_t number = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (problem != std::errc() || end != text.data() + text.size())
    throw Error(formatted("the store sent \"{}\" instead of a number.", text),
                "all ranks must run the same version of fsdp.");
  return number;
}

StoreGone gone() {
  return {"the rendezvous store is gone: the process that holds it (rank 0) ended.",
          "see what that process printed last."};
}

StoreSilent silent(milliseconds limit) {
  return {formatted("the rendezvous store didn't answer within {:g} s.",
                    static_cast<double>(limit.count()) / 1000),
          "rank 0's process holds it: is that process stopped, or its host cut off or overloaded?"};
}

// Why there is no connection. `false_store`: something listens, but it isn't this run's store.
struct NoConnection {
  std::string why;
  bool false_store = false;
  bool refused = false;  // nobody listens
};

// Proves the secret, and checks the listener's proof.
std::optional<NoConnection> prove(const FileDescriptor& socket, const StoreAddress& address,
                                  sockets::Deadline deadline) {
  Handshake handshake(Handshake::Role::kCaller, address.secret, address.context);
  std::string received;
  for (;;) {
    int problem = sockets::send_all(socket, handshake.outgoing(), deadline);
    if (!problem && handshake.done()) return std::nullopt;
    if (!problem) problem = sockets::receive_some(socket, received, 256, deadline);
    if (problem == ETIMEDOUT) return NoConnection{"what listens there doesn't answer"};
    if (problem) return NoConnection{"what listens there closed the connection"};
    handshake.take(received);
    if (!handshake.problem().empty())
      return NoConnection{"what listens there " + handshake.problem(), /*false_store=*/true};
  }
}

FileDescriptor open_connection(const StoreAddress& address, sockets::Deadline deadline,
                               NoConnection& failure) {
  FileDescriptor socket;
  failure = {};
  if (address.unix_name.empty()) {
    socket = sockets::connect_tcp(address.host, address.port, deadline, failure.why);
    failure.refused = failure.why == std::strerror(ECONNREFUSED);
  } else {
    int problem = 0;
    socket = sockets::connect_unix(address.unix_name, problem);
    failure.refused = problem == ECONNREFUSED;
    if (!socket) failure.why = std::strerror(problem);
    if (socket && sockets::owner_of(socket).user != geteuid()) {
      failure = {"what listens there belongs to another user", /*false_store=*/true};
      return {};
    }
  }
  if (!socket) return {};
  if (auto refused = prove(socket, address, deadline)) {
    failure = *refused;
    return {};
  }
  return socket;
}

}  // namespace

std::string StoreAddress::text() const {
  return unix_name.empty() ? formatted("{}:{}", host, port) : "@" + unix_name;
}

// What all clones of a client have in common.
struct StoreClient::Shared {
  StoreAddress address;
  std::shared_ptr<StoreServer> server;  // in rank 0's process
  Mutex mutex;
  std::vector<FileDescriptor> idle FSDP_GUARDED_BY(mutex);

  FileDescriptor take_idle() {
    for (;;) {
      FileDescriptor socket;
      {
        Lock lock(mutex);
        if (idle.empty()) return {};
        socket = std::move(idle.back());
        idle.pop_back();
      }
      // Nothing may arrive between two calls: if something has, the store closed it.
      pollfd state{socket.get(), POLLIN, 0};
      if (poll(&state, 1, 0) == 0) return socket;
    }
  }

  FileDescriptor connection(Deadline deadline, milliseconds limit) {
    if (FileDescriptor socket = take_idle()) return socket;
    NoConnection failure;
    do {
      if (FileDescriptor socket = open_connection(address, deadline, failure)) return socket;
      if (failure.refused || failure.false_store) throw gone();
      std::this_thread::sleep_for(milliseconds(5));  // Ends: at the deadline
    } while (Clock::now() < deadline);
    throw silent(limit);
  }

  void give_back(FileDescriptor socket) {
    Lock lock(mutex);
    idle.push_back(std::move(socket));
  }
};

StoreClient::StoreClient(std::shared_ptr<Shared> shared, milliseconds timeout)
    : c10d::Store(timeout), shared_(std::move(shared)) {}

c10::intrusive_ptr<StoreClient> StoreClient::connect(StoreAddress address,
                                                     std::shared_ptr<StoreServer> server, int rank,
                                                     milliseconds timeout, milliseconds distrust) {
  auto shared = std::make_shared<Shared>();
  shared->address = std::move(address);
  shared->server = std::move(server);
  const auto begun = Clock::now(), deadline = begun + timeout;
  std::optional<Clock::time_point> distrusted;
  NoConnection failure, latest;
  milliseconds pause(5);
  for (;;) {
    if (FileDescriptor socket = open_connection(shared->address, deadline, latest)) {
      shared->give_back(std::move(socket));
      return c10::make_intrusive<StoreClient>(std::move(shared), timeout);
    }
    const auto now = Clock::now();
    if (latest.false_store || !failure.false_store) failure = latest;  // says more than a silence
    if (latest.false_store && !distrusted) distrusted = now;
    if (now >= deadline || (distrusted && now - *distrusted >= distrust)) break;
    // Ends: at the deadline.
    std::this_thread::sleep_for(std::min<Clock::duration>(pause, deadline - now));
    pause = std::min(pause * 2, milliseconds(100));
  }
  const std::string where = shared->address.text();
  const auto tried = std::chrono::duration<double>(Clock::now() - begun).count();
  const std::string hint =
      failure.false_store
          ? "another run or program has this address; with a secret (FSDP_SECRET), it must be the "
            "same on every node. See docs/security.md."
      : shared->address.unix_name.empty()
          ? formatted(
                "check that rank 0 is running, and that MASTER_ADDR and MASTER_PORT ({}) are "
                "reachable from this host. FSDP_TIMEOUT (seconds) allows more time.",
                where)
          : "check that rank 0 is running on this host. Ranks in containers with networks of their "
            "own are on several hosts: LOCAL_WORLD_SIZE must count the ranks of one. FSDP_TIMEOUT "
            "(seconds) allows more time.";
  throw CodedError(kExitLostRank,
                   formatted("rank {} could not reach the store of rank 0 at {} in {:.0f} s: {}.",
                             rank, where, tried, failure.why),
                   hint);
}

c10::intrusive_ptr<c10d::Store> StoreClient::clone() {
  return c10::make_intrusive<StoreClient>(shared_, timeout_);
}

std::vector<std::string> StoreClient::ask(StoreRequest request, milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  const std::string message = encode(request);
  if (message.size() > kMostMessage)
    throw Error(formatted("the store takes at most {} bytes at once, not {}.", kMostMessage,
                          message.size()),
                "divide the value, or send it with a collective.");
  FileDescriptor socket = shared_->connection(deadline, limit);
  int problem = sockets::send_all(socket, message, deadline);
  std::string received;
  std::optional<std::string> text;
  bool too_long = false;
  while (!problem && !text && !too_long) {
    problem = sockets::receive_some(socket, received, kReadSize, deadline);
    if (!problem) text = take_message(received, too_long);
  }
  if (problem == ETIMEDOUT) throw silent(limit);
  if (problem) throw gone();
  const auto answer = text ? decode_answer(*text) : std::nullopt;
  if (!answer || !received.empty())
    throw StoreGone("the store sent a message that can't be read.",
                    "all ranks must run the same version of fsdp.");
  shared_->give_back(std::move(socket));
  if (answer->kind == StoreAnswer::kTimeout) {
    std::string keys = request.fields.empty() ? "" : request.fields.front();
    if (request.fields.size() > 1) keys += formatted(" and {} more", request.fields.size() - 1);
    throw StoreTimeout(
        formatted("nobody set the store's key {} within {:g} s.", keys,
                  static_cast<double>(request.wait_ms) / 1000),
        "is the rank that sets it running? FSDP_TIMEOUT (seconds) allows more time.");
  }
  if (answer->kind == StoreAnswer::kRefused)
    throw Error(formatted("the store refuses a call: {}.",
                          answer->fields.empty() ? "" : answer->fields.front()),
                "use it for small values only.");
  return answer->fields;
}

std::vector<std::string> StoreClient::ask_for_keys(StoreCall call,
                                                   const std::vector<std::string>& keys,
                                                   milliseconds wait) {
  wait = std::clamp(wait, milliseconds(0), milliseconds(std::chrono::hours(24 * 365)));
  return ask({call, static_cast<uint64_t>(wait.count()), keys}, wait + kAnswer);
}

// A call that returns at once, unless the store's process is stopped.
static std::vector<std::string> only(std::vector<std::string> fields, size_t count) {
  if (fields.size() != count)
    throw Error(formatted("the store sent {} values instead of {}.", fields.size(), count),
                "all ranks must run the same version of fsdp.");
  return fields;
}

void StoreClient::set(const std::string& key, const std::vector<uint8_t>& value) {
  ask({StoreCall::kSet, 0, {key, text_of(value)}}, timeout_);
}

std::vector<uint8_t> StoreClient::compareSet(const std::string& key,
                                             const std::vector<uint8_t>& expected,
                                             const std::vector<uint8_t>& desired) {
  return bytes_of(
      only(ask({StoreCall::kCompareSet, 0, {key, text_of(expected), text_of(desired)}}, timeout_),
           1)[0]);
}

std::vector<uint8_t> StoreClient::get(const std::string& key) {
  return bytes_of(only(ask_for_keys(StoreCall::kGet, {key}, timeout_), 1)[0]);
}

int64_t StoreClient::add(const std::string& key, int64_t value) {
  return number_of(only(ask({StoreCall::kAdd, 0, {key, std::to_string(value)}}, timeout_), 1)[0]);
}

bool StoreClient::deleteKey(const std::string& key) {
  return only(ask({StoreCall::kDelete, 0, {key}}, timeout_), 1)[0] == "1";
}

bool StoreClient::check(const std::vector<std::string>& keys) {
  return only(ask({StoreCall::kCheck, 0, keys}, timeout_), 1)[0] == "1";
}

int64_t StoreClient::getNumKeys() {
  return number_of(only(ask({StoreCall::kCount, 0, {}}, timeout_), 1)[0]);
}

void StoreClient::wait(const std::vector<std::string>& keys) {
  wait(keys, timeout_);
}

void StoreClient::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  ask_for_keys(StoreCall::kWait, keys, timeout);
}

void StoreClient::append(const std::string& key, const std::vector<uint8_t>& value) {
  ask({StoreCall::kAppend, 0, {key, text_of(value)}}, timeout_);
}

std::vector<std::vector<uint8_t>> StoreClient::multiGet(const std::vector<std::string>& keys) {
  std::vector<std::vector<uint8_t>> values;
  for (const auto& text : only(ask_for_keys(StoreCall::kGet, keys, timeout_), keys.size()))
    values.push_back(bytes_of(text));
  return values;
}

void StoreClient::multiSet(const std::vector<std::string>& keys,
                           const std::vector<std::vector<uint8_t>>& values) {
  TORCH_CHECK(keys.size() == values.size(), "multiSet: keys and values differ in number");
  for (size_t i = 0; i < keys.size(); ++i) set(keys[i], values[i]);
}

std::vector<std::string> StoreClient::listKeys() {
  return ask({StoreCall::kList, 0, {}}, timeout_);
}

}  // namespace fsdp::comm
