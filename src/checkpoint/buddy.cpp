#include "checkpoint/buddy.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/environment.h"
#include "base/format.h"
#include "base/mutex.h"
#include "base/secret.h"
#include "base/sockets.h"
#include "base/trusted_stream.h"
#include "checkpoint/files.h"
#include "checkpoint/manifest.h"
#include "checkpoint/save_file.h"
#include "checkpoint/together.h"
#include "comm/next_number.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

using Path = std::filesystem::path;
using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;
using Sizes = std::map<std::string, int64_t>;  // of files, by name

constexpr int64_t kSendPiece = 1 << 20;
constexpr std::chrono::milliseconds kLook{5};

struct HostAddress {
  std::string host;
  int port = 0;
};

FileDescriptor listen_anywhere() {
  int problem = 0;
  FileDescriptor socket = sockets::bind_tcp(0, problem);
  if (socket && listen(socket.get(), SOMAXCONN) != 0) {
    problem = errno;
    socket.close();
  }
  if (!socket)
    throw Error(formatted("no port for copies of checkpoints in memory: {}.", std::strerror(problem)),
                "recovery.buddy=off does without them.");
  return socket;
}

// Where the other hosts reach this one: on the way on which they reach rank 0.
std::string address_here(const World& world) {
  const std::string master = environment::text("MASTER_ADDR").value_or("localhost");
  return world.rank() == 0 ? master : sockets::own_address_towards(master);
}

// Addresses of all hosts in the order of their ranks, and which of them this one is. Collective.
std::pair<std::vector<HostAddress>, size_t> meet(const World& world, int port) {
  const bool leads = world.local_rank() == 0;
  const std::string mine = leads ? Json::array({address_here(world), port}).dump() : "";
  std::vector<HostAddress> hosts;
  size_t here = 0;
  int rank = 0;
  for (const std::string& text : texts_of_all(world, "hosts that keep copies", mine)) {
    if (rank++ == world.rank()) here = hosts.size();
    if (text.empty()) continue;
    const Json address = Json::parse(text);
    hosts.push_back({address.at(0), address.at(1)});
  }
  return {hosts, here};
}

// A message of the other side, which has this key.
Json message_with(const char* key, const std::string& line) {
  Json message = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (message.is_object() && message.contains("problem"))
    throw Error(formatted("the next host can't keep copies: {}", message.at("problem").dump()),
                "see that host's memory; recovery.buddy=off does without copies.");
  if (!message.is_object() || !message.contains(key))
    throw Error("another host sent a message about copies that can't be read.",
                "install the same fsdp on all nodes.");
  return message;
}

Path plain_name(const std::string& name) {
  if (name.empty() || name.front() == '.' || name.find('/') != std::string::npos)
    throw Error(formatted("another host names a checkpoint {}.", name),
                "install the same fsdp on all nodes.");
  return name;
}

}  // namespace

class Buddy::Ring {
 public:
  Ring(const World& world, Path folder, FileDescriptor listener,
       const std::vector<HostAddress>& hosts, size_t here, int number)
      : folder_(std::move(folder)),
        arriving_(folder_.parent_path() / "arriving"),
        listener_(std::move(listener)),
        next_(hosts[(here + 1) % hosts.size()]),
        limit_(world.timeout()) {
    for (int local = 0; local < world.local_size(); ++local)
      ours_.insert(file_of(world.rank() + local));
    const size_t before = (here + hosts.size() - 1) % hosts.size();
    sender_ = std::thread([this, number, here] { send_copies(context(number, here)); });
    receiver_ = std::thread([this, number, before] { take_copies(context(number, before)); });
  }

  ~Ring() {
    stop_.set();
    {
      Lock lock(mutex_);
      stopping_ = true;
    }
    wanted_changed_.notify_all();
    sender_.join();    // Ends: all its waits see the stop
    receiver_.join();  // Ends: likewise
    std::error_code ignored;
    std::filesystem::remove_all(arriving_, ignored);
  }

  void copy(const std::string& name) {
    Lock lock(mutex_);
    wanted_ = name;
    wanted_changed_.notify_all();
  }

  State state() const {
    Lock lock(mutex_);
    if (!problem_.empty()) return State::kFailed;
    return wanted_.empty() ? State::kDone : State::kCopying;
  }
  std::string problem() const {
    Lock lock(mutex_);
    return problem_;
  }
  double seconds() const {
    Lock lock(mutex_);
    return seconds_;
  }

 private:
  static std::string context(int number, size_t from) {
    return formatted("copies/{}/{}", number, from);
  }
  StreamTerms terms(const std::string& context) const {
    return {secret::of_environment(), context, limit_, stop_};
  }

  // Runs `work` until it fails or the stop is set.
  template <typename Work>
  void guarded(const Work& work) noexcept {
    try {
      work();
    } catch (const Stopped&) {
    } catch (const std::exception& error) {
      Lock lock(mutex_);
      if (problem_.empty()) problem_ = error.what();
    }
  }

  // --- the thread that sends ---

  void send_copies(const std::string& context) {
    guarded([&] {
      auto next = TrustedStream::connect(next_.host, next_.port, terms(context));
      while (const auto name = await_wanted()) {
        const auto begun = Clock::now();
        send(next, *name);
        Lock lock(mutex_);
        seconds_ = std::chrono::duration<double>(Clock::now() - begun).count();
        if (wanted_ == *name) wanted_.clear();
      }
    });
  }

  std::optional<std::string> await_wanted() {
    Lock lock(mutex_);
    wanted_changed_.wait(lock, [&]() FSDP_REQUIRES(mutex_) {  // Ends: with this object
      return stopping_ || !wanted_.empty();
    });
    return stopping_ ? std::nullopt : std::optional(wanted_);
  }

  void send(TrustedStream& next, const std::string& name) const {
    const Path dir = folder_ / name;
    Sizes files;
    for (const std::string& file : ours_) {
      std::error_code none;
      const auto size = std::filesystem::file_size(dir / file, none);
      if (!none) files[file] = static_cast<int64_t>(size);
    }
    next.send(Json{{"checkpoint", name}, {"files", files}}.dump() + "\n");
    const Json answer = message_with("missing", next.line());
    for (const std::string& file : answer.at("missing").get<std::vector<std::string>>())
      send_file(next, dir / file, files.at(file));
    message_with("kept", next.line());
  }

  static void send_file(TrustedStream& next, const Path& path, int64_t size) {
    const files::Input file(path);
    std::string piece;
    for (int64_t at = 0; at < size; at += kSendPiece) {
      piece.resize(static_cast<size_t>(std::min(kSendPiece, size - at)));
      file.read(at, piece.data(), piece.size());
      next.send(piece);
    }
  }

  // --- the thread that receives ---

  void take_copies(const std::string& context) {
    guarded([&] {
      auto before = TrustedStream::accept(listener_, terms(context));
      for (;;) take_one(before);
    });
  }

  void take_one(TrustedStream& before) {
    const Json offer = message_with("files", before.line(/*patience=*/true));
    try {
      take(before, folder_ / plain_name(offer.at("checkpoint")), offer.at("files").get<Sizes>());
    } catch (const Error& error) {
      before.send(Json{{"problem", error.message()}}.dump() + "\n");
      throw;
    }
  }

  void take(TrustedStream& before, const Path& dir, const Sizes& sizes) const {
    const Manifest manifest = await_manifest(dir);
    std::vector<std::string> missing;
    for (const auto& [file, size] : sizes)
      if (manifest.files.contains(file) && !std::filesystem::exists(dir / file))
        missing.push_back(file);
    before.send(Json{{"missing", missing}}.dump() + "\n");
    for (const std::string& file : missing)
      take_file(before, dir, sizes.at(file), manifest.files.at(file), file);
    before.send(Json{{"kept", dir.filename().string()}}.dump() + "\n");
  }

  // Every host has the whole manifest, but this one's may not have its name yet.
  Manifest await_manifest(const Path& dir) const {
    const auto deadline = Clock::now() + limit_;
    while (Clock::now() < deadline && !stop_.is_set()) {
      if (auto manifest = read_manifest(dir)) return *manifest;
      std::this_thread::sleep_for(kLook);  // Ends: at the deadline
    }
    if (stop_.is_set()) throw Stopped{};
    throw Error(formatted("{}: there is no such checkpoint in the memory of this host.", dir),
                "see the warnings of this host's ranks.");
  }

  void take_file(TrustedStream& before, const Path& dir, int64_t size, const FileSums& expected,
                 const std::string& file) const {
    files::make_directories(arriving_);
    files::Output out(arriving_ / file, size);
    before.receive(size, [&](const char* bytes, size_t count) { out.append(bytes, count); });
    const FileSums arrived = out.close();
    if (arrived.size != expected.size || arrived.sums != expected.sums)
      throw Error(formatted("{}: the copy of another host's {} isn't what was saved.", dir, file),
                  "see whether that host's memory is damaged.");
    files::rename(arriving_ / file, dir / file);
  }

  const Path folder_, arriving_;
  const FileDescriptor listener_;
  const HostAddress next_;
  const std::chrono::milliseconds limit_;
  std::set<std::string> ours_;  // names of this host's files

  StopEvent stop_;
  mutable Mutex mutex_;
  Condition wanted_changed_;
  bool stopping_ FSDP_GUARDED_BY(mutex_) = false;
  std::string wanted_ FSDP_GUARDED_BY(mutex_);  // being copied; "": nothing
  std::string problem_ FSDP_GUARDED_BY(mutex_);
  double seconds_ FSDP_GUARDED_BY(mutex_) = 0;
  std::thread sender_, receiver_;
};

Buddy::Buddy(const World& world, const Path& folder) {
  const int number = comm::next_number(world);
  FileDescriptor listener;
  together(world, "a port for copies of checkpoints", [&] {
    if (world.local_rank() == 0) listener = listen_anywhere();
  });
  const auto [hosts, here] = meet(world, listener ? sockets::port_of(listener) : 0);
  if (world.local_rank() == 0)
    ring_ = std::make_unique<Ring>(world, folder, std::move(listener), hosts, here, number);
}

Buddy::~Buddy() = default;

void Buddy::copy(const std::string& name) {
  if (ring_) ring_->copy(name);
}

Buddy::State Buddy::state() const {
  return ring_ ? ring_->state() : State::kDone;
}

std::string Buddy::problem() const {
  return ring_ ? ring_->problem() : "";
}

double Buddy::seconds() const {
  return ring_ ? ring_->seconds() : 0;
}

}  // namespace fsdp::checkpoint
