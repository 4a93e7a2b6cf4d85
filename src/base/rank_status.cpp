#include "base/rank_status.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstring>
#include <sstream>
#include <utility>

#include "base/environment.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "base/table.h"

namespace fsdp::rank_status {
namespace {

constexpr uint64_t kMagic = 0x3473757461747366;  // "fstatus4"
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
constexpr double kMostGrace = 1e6;  // seconds

int64_t now_ns() {  // the same clock in every process of a host
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

}  // namespace

// A text that one process writes and another reads. The version is odd during a write; a reader
// that sees it change reads again.
template <size_t kWords>
struct SharedText {
  std::atomic<uint32_t> version;
  std::array<std::atomic<uint64_t>, kWords> words;

  void store(std::initializer_list<std::string_view> parts) {
    char bytes[8 * kWords] = {};
    size_t size = 0;
    for (std::string_view part : parts) {
      size_t taken = std::min(part.size(), sizeof bytes - 1 - size);
      std::memcpy(bytes + size, part.data(), taken);
      size += taken;
    }
    uint32_t before = version.load(std::memory_order_relaxed);
    if (before % 2 == 1) return;
    if (!version.compare_exchange_strong(before, before + 1, std::memory_order_acquire)) return;
    for (size_t i = 0; i < kWords; ++i) {
      uint64_t word;
      std::memcpy(&word, bytes + 8 * i, sizeof word);
      words[i].store(word, std::memory_order_release);  // not before the version is odd
    }
    version.store(before + 2, std::memory_order_release);
  }

  void load_into(char (&bytes)[8 * kWords + 1]) const {
    for (int attempt = 0; attempt < 1000; ++attempt) {
      uint32_t before = version.load(std::memory_order_acquire);
      for (size_t i = 0; i < kWords; ++i) {
        uint64_t word = words[i].load(std::memory_order_acquire);
        std::memcpy(bytes + 8 * i, &word, sizeof word);
      }
      bytes[8 * kWords] = 0;
      if (before % 2 == 0 && version.load(std::memory_order_relaxed) == before) return;
    }
    bytes[0] = 0;  // the writer was stopped in the middle of it
  }

  std::string load() const {
    char bytes[8 * kWords + 1] = {};
    load_into(bytes);
    return bytes;
  }
};

struct Page {
  std::atomic<uint64_t> magic;
  std::atomic<int32_t> pid;
  std::atomic<uint32_t> stopping;  // written by the launcher, like the next three
  std::atomic<int32_t> let_go;     // attempt
  std::atomic<int32_t> announced;  // attempt; after its variables
  SharedText<128> variables;
  std::atomic<uint32_t> recovers;
  std::atomic<int32_t> waits_for, joined;  // attempts
  std::atomic<int64_t> reported_ns;
  std::atomic<int64_t> step;
  std::atomic<double> grace_s;
  std::atomic<uint32_t> failing;
  std::atomic<uint64_t> collectives_begun;
  std::atomic<uint64_t> collective_ended;  // number of the last one begun, once it has ended
  SharedText<8> phase;
  SharedText<16> unit;
  SharedText<20> collective;
  std::atomic<uint32_t> answers;
  std::atomic<uint32_t> reports;
  SharedText<64> report_folder;
};

namespace {

Page* map_page(int fd) {
  void* memory = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<Page*>(memory);
}

// The page that the launcher passed down. nullptr: none, or the descriptor is something else by
// now, because a program in between closed it.
Page* inherited_page() {
  auto text = environment::text(kVariable);
  if (!text) return nullptr;
  int fd = -1;
  auto [end, problem] = std::from_chars(text->data(), text->data() + text->size(), fd);
  if (problem != std::errc() || end != text->data() + text->size()) return nullptr;
  struct stat file {};
  if (fstat(fd, &file) != 0 || !S_ISREG(file.st_mode)) return nullptr;
  if (file.st_size != static_cast<off_t>(sizeof(Page))) return nullptr;
  if ((fcntl(fd, F_GET_SEALS) & kSeals) != kSeals) return nullptr;
  Page* page = map_page(fd);
  if (page && page->magic.load() != kMagic) {
    munmap(page, sizeof(Page));
    return nullptr;
  }
  return page;
}

Page& own_page() {
  static Page private_page;
  static Page* page = [] {
    Page* inherited = inherited_page();
    return inherited ? inherited : &private_page;
  }();
  return *page;
}

Page& report() {
  Page& page = own_page();
  page.pid.store(getpid(), std::memory_order_relaxed);
  page.reported_ns.store(now_ns(), std::memory_order_relaxed);
  return page;
}

Status read_page(const Page& page) {
  Status status;
  status.pid = page.pid.load(std::memory_order_relaxed);
  status.step = page.step.load(std::memory_order_relaxed);
  status.phase = page.phase.load();
  status.unit = page.unit.load();
  status.in_collective = page.collectives_begun.load() != page.collective_ended.load();
  status.collective = page.collective.load();
  status.answers = page.answers.load() != 0;
  status.reports = page.reports.load();
  status.report_folder = page.report_folder.load();
  double grace = page.grace_s.load(std::memory_order_relaxed);
  if (std::isfinite(grace)) status.grace_s = std::clamp(grace, 0.0, kMostGrace);
  status.failing = page.failing.load(std::memory_order_relaxed) != 0;
  int64_t age_ns = now_ns() - page.reported_ns.load(std::memory_order_relaxed);
  status.age_s = std::max(0.0, static_cast<double>(age_ns) * 1e-9);
  status.recovers = page.recovers.load() != 0;
  status.waits_for = page.waits_for.load();
  status.joined = page.joined.load();
  return status;
}

// The fields of /proc/PID/stat after the command's name, which may hold anything; empty: no such
// process.
std::string stat_fields(pid_t pid) {
  const std::string line = read_if_there(formatted("/proc/{}/stat", pid));
  size_t name_end = line.rfind(')');
  return name_end == std::string::npos || name_end + 2 > line.size() ? ""
                                                                     : line.substr(name_end + 2);
}

std::string rounded(double seconds, int digits) {
  return formatted("{:.{}f} s", seconds, digits);
}

}  // namespace

void set_step(int64_t step) {
  report().step.store(step, std::memory_order_relaxed);
}

void set_phase(std::string_view phase) {
  Page& page = report();
  page.phase.store({phase});
  page.unit.store({});
}

void set_unit(std::string_view unit, std::string_view used_by) {
  report().unit.store({"unit \"", unit, "\" (", used_by, ")"});
}

void set_grace(double seconds) {
  report().grace_s.store(seconds, std::memory_order_relaxed);
}

void set_answers(bool answers) {
  report().answers.store(answers);
}

void add_report(const char* folder) noexcept {
  Page& page = own_page();
  if (*folder) page.report_folder.store({folder});
  page.reports.fetch_add(1);
}

void set_failing() {
  report().failing.store(1, std::memory_order_relaxed);
}

Collective::Collective(std::string_view operation, int64_t elements, std::string_view label) {
  Page& page = report();
  number_ = page.collectives_begun.fetch_add(1) + 1;
  std::string count = elements > 0 ? with_separators(elements) : "";
  page.collective.store({operation, elements > 0 ? " of " : "", count,
                         elements > 0 ? " elements" : "", label.empty() ? "" : " for ", label});
}

Collective::~Collective() {
  Page& page = report();
  if (page.collectives_begun.load() == number_) page.collective_ended.store(number_);
}

void set_recovers(bool recovers) {
  report().recovers.store(recovers);
}

void set_waits_for(int attempt) {
  report().waits_for.store(attempt);
}

void set_joined(int attempt) {
  report().joined.store(attempt);
}

Start announced() {
  const Page& page = own_page();
  Start start;
  start.attempt = page.announced.load();
  if (start.attempt > 0) start.variables = page.variables.load();
  return start;
}

bool told_to_let_go() {
  const Page& page = own_page();
  return page.let_go.load() > page.waits_for.load();
}

Status current() {
  return read_page(own_page());
}

int64_t step() {
  return own_page().step.load(std::memory_order_relaxed);
}

Snapshot snapshot() noexcept {
  const Page& page = own_page();
  Snapshot status;
  status.step = page.step.load(std::memory_order_relaxed);
  page.phase.load_into(status.phase);
  page.unit.load_into(status.unit);
  page.collective.load_into(status.collective);
  status.in_collective = page.collectives_begun.load() != page.collective_ended.load();
  return status;
}

bool launcher_is_stopping() {
  return own_page().stopping.load() != 0;
}

SharedPage::SharedPage() {
  fd_ = memfd_create("fsdp-status", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd_ < 0) return;
  // Sealed: nothing that a rank does to the file makes the launcher's reads fail.
  bool ready = ftruncate(fd_, sizeof(Page)) == 0 && fcntl(fd_, F_ADD_SEALS, kSeals) == 0;
  if (ready) page_ = map_page(fd_);
  if (page_) page_->magic.store(kMagic);
  if (!page_) close_fd();
}

SharedPage::SharedPage(SharedPage&& other) noexcept {
  *this = std::move(other);
}

SharedPage& SharedPage::operator=(SharedPage&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(page_, other.page_);
  return *this;
}

SharedPage::~SharedPage() {
  close_fd();
  if (page_) munmap(page_, sizeof(Page));
}

void SharedPage::close_fd() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

Status SharedPage::read() const {
  return page_ ? read_page(*page_) : Status{};
}

void SharedPage::announce_stop() {
  if (page_) page_->stopping.store(1);
}

void SharedPage::announce(const Start& start) {
  if (!page_) return;
  page_->variables.store({start.variables});
  page_->announced.store(start.attempt);
}

void SharedPage::tell_to_let_go(int attempt) {
  if (page_) page_->let_go.store(attempt);
}

double default_grace(double slowest_step_s) {
  return std::max(kLeastGrace, 3 * slowest_step_s);
}

std::string thread_state(pid_t pid) {
  std::string fields = stat_fields(pid);
  char state = fields.empty() ? 'X' : fields.front();
  std::string text;
  if (state == 'R') return "running";
  if (state == 'T' || state == 't') return "stopped";
  if (state == 'Z' || state == 'X') return "gone";
  text = state == 'D' ? "blocked in the kernel" : "sleeping";
  const std::string place = read_if_there(formatted("/proc/{}/wchan", pid));
  if (!place.empty() && place != "0") text += " in " + place;
  return text;
}

std::optional<double> cpu_seconds(pid_t pid) {
  std::istringstream fields(stat_fields(pid));
  std::string skipped;
  for (int field = 0; field < 11; ++field) fields >> skipped;  // state to cmajflt
  double user = 0, kernel = 0;
  if (!(fields >> user >> kernel)) return std::nullopt;
  return (user + kernel) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

std::string whereabouts(const Status& status, pid_t pid, std::optional<double> cpu_before) {
  std::string text;
  auto add = [&](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (status.step > 0) add(formatted("step {}", status.step));
  if (!status.phase.empty()) add(status.phase);
  if (!status.unit.empty()) add(status.unit);
  if (!status.collective.empty())
    add((status.in_collective ? "in " : "last collective ") + status.collective);
  text = text.empty() ? "no status reported"
                      : text + "; last report " + rounded(status.age_s, 0) + " ago";
  text += "; main thread " + thread_state(pid);
  auto cpu = cpu_seconds(pid);
  if (cpu && cpu_before)
    text += ", " + rounded(std::max(0.0, *cpu - *cpu_before), 1) + " of CPU time since the signal";
  return text;
}

}  // namespace fsdp::rank_status
