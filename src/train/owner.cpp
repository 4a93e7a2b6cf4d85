#include "train/owner.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/file_error.h"
#include "base/format.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/process.h"
#include "base/regular_file.h"
#include "checkpoint/folder.h"
#include "fsdp/error.h"
#include "train/stop.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr size_t kLongestClaim = 4096;  // bytes
constexpr auto kLook = std::chrono::milliseconds(50);
constexpr int kMostTries = 100;  // to win against others that take the directory now

// A file in owner/.
struct Claim {
  int64_t number = 0;
  std::string text;           // of the file
  std::string host, machine;  // machine: host_identity()
  pid_t pid = 0;
  int64_t start = 0;      // of the process: start_of()
  std::string since;      // when it took the directory, for messages
  bool locked = false;    // it holds a lock on the file while it lives
  bool released = false;  // it gave the directory back
  int64_t touched = 0;    // nanoseconds, in the file system's time
};

[[noreturn]] void fail_owner(const std::string& what, const fs::path& file, int code) {
  throw Error(formatted("can't {} {}: {}.", what, file, errno_text(code)), file_hint(code));
}

int64_t touched_at(const struct stat& status) {
  return int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
}

fs::path claim_file(const fs::path& folder, int64_t number) {
  return folder / formatted("{}.json", number);
}

std::string time_text() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  char text[32] = "";
  if (localtime_r(&now, &parts)) std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &parts);
  return text;
}

std::string text_of(int64_t number, const std::string& epoch, bool locked, bool released) {
  const nlohmann::ordered_json json = {
      {"number", number},           {"epoch", epoch},    {"host", host_name()},
      {"machine", host_identity()}, {"pid", ::getpid()}, {"start", start_of(::getpid())},
      {"since", time_text()},       {"locked", locked},  {"released", released}};
  return json.dump(2, ' ', true, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

// The contents of a small file; nullopt if it doesn't exist. Opened anew each time: NFS then asks
// the server.
std::optional<Claim> read_claim(const fs::path& file) {
  const RegularFile opened(file);
  if (opened.code() == ENOENT || opened.code() == ESTALE || opened.code() == ENOTDIR)
    return std::nullopt;
  opened.or_throw();
  Claim claim;
  claim.text.resize(kLongestClaim);
  struct stat status {};
  const ssize_t got = ::pread(opened.descriptor(), claim.text.data(), claim.text.size(), 0);
  const int code = errno;
  const bool known = ::fstat(opened.descriptor(), &status) == 0;
  if (got < 0 && code == ESTALE) return std::nullopt;
  if (got < 0) fail_owner("read", file, code);
  claim.text.resize(static_cast<size_t>(got));
  if (known) claim.touched = touched_at(status);
  return claim;
}

// Fills in what the text says. A damaged text leaves an unknown host, of which only touches tell.
void parse(Claim& claim) {
  const auto json = nlohmann::json::parse(claim.text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return;
  try {
    claim.host = json.value("host", "");
    claim.machine = json.value("machine", "");
    claim.pid = json.value("pid", 0);
    claim.start = json.value("start", int64_t{0});
    claim.since = json.value("since", "");
    claim.locked = json.value("locked", false);
    claim.released = json.value("released", false);
  } catch (const nlohmann::json::exception&) {  // a value of another type
    claim.machine.clear();
  }
}

// The numbers of the files in owner/.
std::vector<int64_t> numbers_in(const fs::path& folder) {
  std::vector<int64_t> numbers;
  std::error_code problem;
  for (const auto& entry : fs::directory_iterator(folder, problem)) {
    const std::string name = entry.path().filename().string();
    const size_t digits = name.find_first_not_of("0123456789");
    if (digits == 0 || digits > 15 || name.substr(digits) != ".json") continue;
    numbers.push_back(std::stoll(name));
  }
  if (problem && problem != std::errc::no_such_file_or_directory)
    fail_owner("read", folder, problem.value());
  return numbers;
}

std::string described(const Claim& claim) {
  if (claim.pid == 0) return "an unknown process";
  std::string text = formatted("process {} on {}", claim.pid, claim.host);
  if (!claim.since.empty()) text += formatted(" (since {})", claim.since);
  return text;
}

// A process of another user may hide its start: it then counts as the owner while it is alive.
bool has_ended(const Claim& claim) {
  const int64_t start = start_of(claim.pid);
  return !Process(claim.pid).alive() || (start != 0 && start != claim.start);
}

// Whether two identities are of one running kernel, perhaps in different containers.
bool same_kernel(const std::string& one, const std::string& other) {
  const size_t cut = one.rfind(':');
  return cut != std::string::npos && other.rfind(':') == cut &&
         one.compare(0, cut, other, 0, cut) == 0;
}

// Network file systems may wait long for their lock service.
bool has_quick_locks(int handle) {
  constexpr long kNfs = 0x6969, kCifs = 0xFF534D42, kSmb2 = 0xFE534D42, kFuse = 0x65735546;
  struct statfs system {};
  if (::fstatfs(handle, &system) != 0) return false;
  const auto type = static_cast<long>(system.f_type) & 0xFFFFFFFF;
  return type != kNfs && type != kCifs && type != kSmb2 && type != kFuse;
}

// Whether somebody holds the lock on a file. nullopt: that can't be told.
std::optional<bool> is_locked(const fs::path& file) {
  const RegularFile opened(file);
  if (!opened.is_open()) return std::nullopt;
  if (::flock(opened.descriptor(), LOCK_SH | LOCK_NB) == 0) return false;
  if (errno == EWOULDBLOCK) return true;
  return std::nullopt;
}

void sleep_unless_interrupted(std::chrono::milliseconds time) {
  if (const int signal = StopSignals::received())
    throw Error(
        formatted("SIG{} came while the run waited for its directory.", sigabbrev_np(signal)),
        "start it again.");
  std::this_thread::sleep_for(time);  // Ends: once
}

}  // namespace

struct Owner::State {
  RunDirectory run;
  Times times;
  fs::path folder, draft;  // draft: where a claim is written before it gets its number
  int64_t number = 0;
  std::string id, epoch, text;
  int handle = -1;  // of the owner's file
  Mutex mutex;
  Condition changed;
  bool ending FSDP_GUARDED_BY(mutex) = false;
  std::thread beating;

  fs::path file() const { return claim_file(folder, number); }
  void take(bool take_over);
  std::optional<Claim> current() const;
  void await_end(const Claim& owner) const;
  void await_silence(Claim owner) const;
  [[noreturn]] void refuse(const Claim& owner, const std::string& why,
                           const std::string& what_to_do) const;
  int64_t time_here() const;
  bool claim(int64_t wanted);
  bool link_draft();
  void write_draft(const std::string& all) const;
  void remove_earlier() const;
  void beat();
  [[noreturn]] void report_loss() const;
};

// The owner's file, or that of the last one.
std::optional<Claim> Owner::State::current() const {
  const auto numbers = numbers_in(folder);
  if (numbers.empty()) return std::nullopt;
  const int64_t highest = *std::max_element(numbers.begin(), numbers.end());
  auto claim = read_claim(claim_file(folder, highest)).value_or(Claim{});
  claim.number = highest;
  parse(claim);
  return claim;
}

void Owner::State::take(bool take_over) {
  write_draft("");  // tells the file system's time
  for (int tries = 0; tries < kMostTries; ++tries) {
    const auto owner = current();
    if (owner && !owner->released && !take_over) await_end(*owner);
    if (!claim(owner ? owner->number + 1 : 1)) continue;
    remove_earlier();
    checkpoint::fence(run.checkpoints(), epoch);
    return;
  }
  throw Error(formatted("{} can't be taken: other processes are taking it, too.", run.root),
              "start one run in it.");
}

// Returns when the owner is known to be gone.
void Owner::State::await_end(const Claim& owner) const {
  if (owner.machine != host_identity()) return await_silence(owner);
  if (owner.pid == ::getpid() && owner.start == start_of(owner.pid)) return;  // an earlier start
  for (const auto begun = Clock::now(); !has_ended(owner); sleep_unless_interrupted(kLook)) {
    const Process process(owner.pid);
    const bool ending = process.ending();
    if (!ending && process.stopped())
      refuse(owner, "which is stopped", formatted("let it go on (kill -CONT {}), or", owner.pid));
    if (Clock::now() - begun >= (ending ? times.ending : times.moment))
      refuse(owner, "which is running", "");
  }
}

void Owner::State::await_silence(Claim owner) const {
  const fs::path theirs = claim_file(folder, owner.number);
  if (owner.locked && same_kernel(owner.machine, host_identity()))
    if (const auto held = is_locked(theirs)) {
      if (!*held) return;
      refuse(owner, "which is running in another container", "");
    }
  const int64_t silence = std::chrono::nanoseconds(times.silence).count();
  const auto begun = Clock::now();
  for (bool told = false;; told = true) {
    const int64_t quiet = time_here() - owner.touched;
    if (quiet >= silence || Clock::now() - begun >= times.silence) return;
    if (!told)
      log::info(
          formatted("{} was last used by {}, {:.0f} s ago: waiting to see whether it is alive",
                    run.root, described(owner), 1e-9 * static_cast<double>(quiet)));
    sleep_unless_interrupted(std::min<std::chrono::milliseconds>(times.beat / 4, kLook * 10));
    const auto now = read_claim(theirs);
    if (!now || now->text != owner.text) return;  // another one is there: take() looks again
    if (now->touched != owner.touched) refuse(owner, "which is alive", "");
  }
}

void Owner::State::refuse(const Claim& owner, const std::string& why,
                          const std::string& what_to_do) const {
  throw Error(
      formatted("{} belongs to {}, {}.", run.root, described(owner), why),
      formatted(
          "two runs would damage each other's files: {}end that one, or choose another --dir; "
          "if you know that it is dead, add --take-over.",
          what_to_do.empty() ? "" : what_to_do + " "));
}

// Now, in the file system's time.
int64_t Owner::State::time_here() const {
  struct stat status {};
  const int handle = ::open(draft.c_str(), O_WRONLY | O_CLOEXEC);
  const bool good =
      handle >= 0 && ::futimens(handle, nullptr) == 0 && ::fstat(handle, &status) == 0;
  const int code = errno;
  if (handle >= 0) ::close(handle);
  if (!good) fail_owner("touch", draft, code);
  return touched_at(status);
}

void Owner::State::write_draft(const std::string& all) const {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC;
  const int handle = ::open(place_of_file(draft).c_str(), kFlags, 0666);
  if (handle < 0) fail_owner("write", draft, errno);
  const ssize_t done = ::write(handle, all.data(), all.size());
  int code = done < 0 ? errno : done < static_cast<ssize_t>(all.size()) ? ENOSPC : 0;
  if (code == 0 && ::fsync(handle) != 0) code = errno;
  if (::close(handle) != 0 && code == 0) code = errno;
  if (code != 0) fail_owner("write", draft, code);
}

// Gives the draft its number, and opens it as `handle`. False: somebody else has the number.
bool Owner::State::link_draft() {
  handle = ::open(draft.c_str(), O_RDWR | O_CLOEXEC);
  if (handle < 0) fail_owner("open", draft, errno);
  // Locked before others can see it.
  const bool locked = has_quick_locks(handle) && ::flock(handle, LOCK_EX | LOCK_NB) == 0;
  text = text_of(number, epoch, locked, /*released=*/false);
  write_draft(text);
  // NFS keeps a file that is open when its name is removed, under another name.
  if (!locked) ::close(std::exchange(handle, -1));
  const int result = ::link(draft.c_str(), file().c_str());
  const int code = errno;
  // An answer of the server may be lost, and the repeated call then finds the name taken, by us.
  struct stat status {};
  if (result == 0 || (::stat(draft.c_str(), &status) == 0 && status.st_nlink == 2)) {
    if (handle < 0) handle = ::open(file().c_str(), O_RDWR | O_CLOEXEC);
    if (handle < 0) fail_owner("open", file(), errno);
    return true;
  }
  if (handle >= 0) ::close(std::exchange(handle, -1));
  if (code == EEXIST) return false;
  if (code != EPERM && code != EOPNOTSUPP && code != ENOSYS) fail_owner("take", file(), code);
  // A file system without hard links.
  text = text_of(number, epoch, /*locked=*/false, /*released=*/false);
  handle = ::open(file().c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (handle < 0 && errno == EEXIST) return false;
  if (handle < 0) fail_owner("take", file(), errno);
  if (::write(handle, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    fail_owner("write", file(), errno);
  return true;
}

// Whether this process got the number, and it is the highest.
bool Owner::State::claim(int64_t wanted) {
  number = wanted;
  epoch = formatted("{}-{}", number, id);
  if (!link_draft()) return false;
  ::unlink(draft.c_str());
  const auto numbers = numbers_in(folder);
  if (std::none_of(numbers.begin(), numbers.end(), [&](int64_t n) { return n > number; }))
    return true;
  // Somebody took a higher one and removed this one before we made it again.
  ::unlink(file().c_str());
  ::close(std::exchange(handle, -1));
  write_draft("");
  return false;
}

void Owner::State::remove_earlier() const {
  for (const int64_t other : numbers_in(folder))
    if (other < number && ::unlink(claim_file(folder, other).c_str()) != 0 && errno != ENOENT)
      fail_owner("remove", claim_file(folder, other), errno);
}

void Owner::State::beat() {
  Lock lock(mutex);
  while (!changed.wait_for(lock, times.beat, [&]() FSDP_REQUIRES(mutex) { return ending; }))
    ::futimens(handle, nullptr);  // if that fails, check() tells why
}

void Owner::State::report_loss() const {
  std::error_code problem;
  if (!fs::is_directory(run.root, problem))
    throw Error(
        formatted("the run's directory {} was deleted or moved while the run wrote to it.",
                  run.root),
        "nothing more is written; start again in another --dir, or move it back and resume.");
  const auto owner = current();
  if (!owner || owner->number <= number)
    throw Error(formatted("{} was deleted or replaced while the run wrote to it.", file()),
                "nothing more is written; leave the files of a run alone while it runs.");
  throw Error(formatted("{} was taken over by {} while this process ({}) didn't run.", run.root,
                        described(*owner), ::getpid()),
              "the run goes on there; this process writes nothing more.");
}

Owner::Owner(const RunDirectory& run, bool take_over, Times times)
    : state_(std::make_unique<State>()) {
  State& state = *state_;
  state.run = run;
  state.times = times;
  state.folder = run.owner();
  state.id = checkpoint::new_writer();
  state.draft = state.folder / formatted("claim-{}", state.id);
  std::error_code problem;
  fs::create_directories(state.folder, problem);
  if (problem) fail_owner("create", state.folder, problem.value());
  try {
    state.take(take_over);
  } catch (...) {
    ::unlink(state.draft.c_str());
    if (state.handle >= 0) ::close(state.handle);
    throw;
  }
  state.beating = std::thread([&state] { state.beat(); });
}

Owner::~Owner() {
  State& state = *state_;
  {
    Lock lock(state.mutex);
    state.ending = true;
  }
  state.changed.notify_all();
  state.beating.join();
  try {
    check();
    state.write_draft(text_of(state.number, state.epoch, false, /*released=*/true));
    if (::rename(state.draft.c_str(), state.file().c_str()) != 0) ::unlink(state.draft.c_str());
  } catch (const std::exception&) {  // it is somebody else's, or gone
  }
  ::close(state.handle);
}

int64_t Owner::number() const {
  return state_->number;
}

const std::string& Owner::epoch() const {
  return state_->epoch;
}

void Owner::check() const {
  const auto mine = read_claim(state_->file());
  if (!mine || mine->text != state_->text) state_->report_loss();
  std::error_code problem;
  if (!fs::is_directory(state_->run.checkpoints(), problem))
    throw Error(formatted("{} was deleted while the run wrote to it.", state_->run.checkpoints()),
                "nothing more is written; start again in another --dir.");
}

}  // namespace fsdp::train
