// The file of the flight recorder: a pickle in the format of PyTorch's, one per rank.
//
// {"version": "2.10", "pg_config": {NAME: {"name", "desc", "ranks"}}, "pg_status": {…},
//  "entries": [{…}], "fsdp": {…}}. torchfrtrace knows NCCL's names only, so each call carries the
//  one
// of its kind there ("nccl:all_reduce"), and ours under keys of our own: operation, count, label,
// …. The label is also the innermost frame of the call's stack, which torchfrtrace prints.
//
// All of this may run in a signal handler: no memory is allocated and no lock is taken.
#include <c10/core/ScalarType.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "base/crash.h"
#include "base/environment.h"
#include "base/format.h"
#include "base/log.h"
#include "base/process.h"
#include "base/rank_status.h"
#include "comm/core/flight_pickle.h"
#include "comm/core/flight_recorder.h"

namespace fsdp::comm::flight {
namespace {

constexpr size_t kLongestReason = 2000;  // bytes

// --- what is written ---

struct Owner {  // who this process is; set once per world
  int rank = -1, size = 0;
  char run[64] = {}, host[65] = {}, identity[128] = {};
};
Owner owner;
std::atomic<const std::string*> folder{nullptr};  // kept: a signal handler may read it
std::atomic_flag writing = ATOMIC_FLAG_INIT;
std::atomic<bool> fault_written{false};

template <size_t kSize>
void keep(char (&field)[kSize], const std::string& text) {
  const size_t size = std::min(text.size(), kSize - 1);
  std::memcpy(field, text.data(), size);
  field[size] = 0;
}

// The name by which torchfrtrace knows an operation.
const char* nccl_name(Operation operation) {
  switch (operation) {
    case Operation::kAllGather:
      return "nccl:_all_gather_base";
    case Operation::kReduceScatter:
      return "nccl:_reduce_scatter_base";
    case Operation::kAllReduce:
      return "nccl:all_reduce";
    case Operation::kBroadcast:
      return "nccl:broadcast";
    case Operation::kAllToAll:
      return "nccl:all_to_all";
    default:  // the ranks only meet
      return "nccl:all_reduce_barrier";
  }
}

void time_item(PickleFile& out, Key key, int64_t ns) {
  out.key(key);
  if (ns == 0) return out.none();
  out.integer(ns);
}

void tensor_items(PickleFile& out, Key sizes, Key dtypes, int64_t elements, const char* dtype) {
  out.key(sizes);
  out.list();
  out.mark();
  out.list();
  out.mark();
  out.integer(elements);
  out.append_all();
  out.append_all();
  out.key(dtypes);
  out.list();
  out.mark();
  out.text(dtype);
  out.append_all();
}

// The label as the frame that issued the call.
void frames_item(PickleFile& out, const Record& record) {
  out.key(kFrames);
  out.list();
  if (!*record.what.label) return;
  out.mark();
  out.dict();
  out.mark();
  out.item(kName, record.what.label);
  out.item(kFilename, "step");
  out.item(kLine, record.step);
  out.set_all();
  out.append_all();
}

void entry(PickleFile& out, const Record& record, int64_t group_number) {
  const Description& what = record.what;
  const bool meets = what.operation == Operation::kBarrier;
  const bool completed = record.ended_ns != 0 && !record.failed;
  out.dict();
  out.mark();
  out.item(kRecordId, static_cast<int64_t>(record.number));
  out.item(kPgId, group_number);
  out.key(kProcessGroup);
  out.text(record.group->name);
  out.text(record.group->backend);
  out.pair();
  out.item(kCollectiveSeqId, static_cast<int64_t>(record.sequence));
  out.item(kP2pSeqId, 0);
  out.item(kOpId, static_cast<int64_t>(record.sequence));
  out.item(kProfilingName, nccl_name(what.operation));
  out.item(kTimeCreated, record.issued_ns);
  const char* dtype = c10::toString(what.type);
  tensor_items(out, kInputSizes, kInputDtypes, meets ? 1 : record.amounts.in, dtype);
  tensor_items(out, kOutputSizes, kOutputDtypes, meets ? 1 : record.amounts.out, dtype);
  out.item(kState, completed ? "completed" : record.started_ns != 0 ? "started" : "scheduled");
  time_item(out, kTimeStarted, record.started_ns);
  time_item(out, kTimeCompleted, completed ? record.ended_ns : 0);
  out.key(kRetired);
  out.boolean(record.ended_ns != 0);
  out.item(kTimeout, record.timeout_ms);
  out.key(kIsP2p);
  out.boolean(false);
  out.item(kThreadId, record.thread);
  frames_item(out, record);
  out.item(kOperation, name(what.operation));
  out.item(kReduce, name(what.reduce));
  out.item(kRoot, what.root);
  out.item(kPath, what.path);
  out.item(kIdentity, what.identity);
  out.item(kCount, what.count);
  out.item(kLabel, what.label);
  out.item(kDevice, record.place.device);
  out.item(kStream, static_cast<int64_t>(record.place.stream));
  out.item(kStep, record.step);
  out.key(kFailed);
  out.boolean(record.failed);
  out.set_all();
}

int64_t number_of(const Group* group) {  // counts from the first one made
  int64_t number = 0;
  for (const Group* earlier = group->next; earlier; earlier = earlier->next) ++number;
  return number;
}

void groups_items(PickleFile& out) {
  out.text("pg_config");
  out.dict();
  out.mark();
  for (const Group* group = last_group(); group; group = group->next) {
    out.text(group->name);
    out.dict();
    out.mark();
    out.item("name", group->name);
    out.item("desc", group->backend);
    out.item("ranks", group->ranks);
    out.set_all();
  }
  out.set_all();
  out.text("pg_status");
  out.dict();
  out.mark();
  for (const Group* group = last_group(); group; group = group->next) {
    char number[24];
    char* digit = number + sizeof number;
    uint64_t rest = static_cast<uint64_t>(number_of(group));
    do *--digit = static_cast<char>('0' + rest % 10);
    while ((rest /= 10) > 0);
    out.text({digit, static_cast<size_t>(number + sizeof number - digit)});
    out.dict();
    out.mark();
    out.item("last_enqueued_collective", static_cast<int64_t>(group->issued.load()));
    out.item("last_started_collective", static_cast<int64_t>(group->started.load()));
    out.item("last_completed_collective", static_cast<int64_t>(group->completed.load()));
    out.set_all();
  }
  out.set_all();
}

void own_items(PickleFile& out, Cause cause, const char* why) {
  const rank_status::Snapshot status = rank_status::snapshot();
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  out.text("fsdp");
  out.dict();
  out.mark();
  out.item("format", 1);
  out.item("run", owner.run);
  out.item("rank", owner.rank);
  out.item("world", owner.size);
  out.item("host", owner.host);
  out.item("host_identity", owner.identity);
  out.item("pid", getpid());
  out.item("time_ns", int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec);
  out.item("cause", cause == Cause::kFault   ? "fault"
                    : cause == Cause::kCrash ? "crash"
                                             : "request");
  out.item("why", std::string_view(why).substr(0, kLongestReason));
  out.item("step", status.step);
  out.item("phase", status.phase);
  out.item("unit", status.unit);
  out.item("collective", status.collective);
  out.text("in_collective");
  out.boolean(status.in_collective);
  out.set_all();
}

bool write_to(int file, Cause cause, const char* why) {
  PickleFile out(file);
  out.dict();
  out.mark();
  out.item("version", "2.10");
  out.item("comm_lib_version", "fsdp");
  groups_items(out);
  out.text("entries");
  out.list();
  out.mark();
  const uint64_t newest = last_number(), first = first_number();
  Record record;
  for (uint64_t number = std::max(first, newest > kKept ? newest - kKept + 1 : 1); number <= newest;
       ++number)
    if (read(number, record)) entry(out, record, number_of(record.group));
  out.append_all();
  own_items(out, cause, why);
  out.set_all();
  return out.finish();
}

// Creates the folder and those above it.
void make_folders(const std::string& path) {
  char part[PATH_MAX];
  if (path.size() >= sizeof part) return;
  for (size_t i = 1; i <= path.size(); ++i) {
    if (i < path.size() && path[i] != '/') continue;
    std::memcpy(part, path.data(), i);
    part[i] = 0;
    mkdir(part, 0777);  // those that exist stay
  }
}

// FOLDER/NAME-RANK in `out`, without snprintf, which isn't safe in a signal handler.
bool path_of(char (&out)[PATH_MAX], const std::string& in, const char* name, int rank) {
  char number[12];
  char* digit = number + sizeof number;
  *--digit = 0;
  do *--digit = static_cast<char>('0' + rank % 10);
  while ((rank /= 10) > 0);
  if (in.size() + std::strlen(name) + std::strlen(digit) + 3 > sizeof out) return false;
  std::strcpy(out, in.c_str());
  std::strcat(out, "/");
  std::strcat(out, name);
  std::strcat(out, digit);
  return true;
}

bool write_file(const std::string& in, Cause cause, const char* why) {
  char draft[PATH_MAX], final[PATH_MAX];
  // torchfrtrace takes every file that ends in a number, so the draft has an end of its own.
  if (!path_of(final, in, "rank-", owner.rank) || !path_of(draft, in, ".draft-", owner.rank))
    return false;
  if (std::strlen(draft) + 5 > sizeof draft) return false;
  std::strcat(draft, ".tmp");
  make_folders(in);
  unlink(draft);  // of a process that was killed; a FIFO there would hang this one
  const int file = open(draft, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file < 0) return false;
  const bool written = write_to(file, cause, why);
  close(file);
  if (written && rename(draft, final) == 0) return true;
  unlink(draft);
  return false;
}

bool lock_file() {
  const timespec pause{0, 1'000'000};
  for (int i = 0; i < 2000; ++i) {
    if (!writing.test_and_set()) return true;
    nanosleep(&pause, nullptr);
  }
  return false;  // this very thread is writing: it crashed there
}

// What a crash leaves on stderr, by pieces that a signal handler may write.
void announce_crash(const std::string& in, const char* why) {
  const char* pieces[] = {"fsdp: ",
                          why,
                          ": what its collectives did last is in ",
                          in.c_str(),
                          "; see it with: fsdp hang ",
                          in.c_str(),
                          "\n"};
  for (const char* piece : pieces)
    if (::write(STDERR_FILENO, piece, std::strlen(piece)) < 0) return;
}

void answer_request(bool by_parent) {
  if (!write(Cause::kRequest, "SIGUSR2")) return rank_status::add_report("");
  if (!by_parent)  // the launcher says it once for all ranks
    log::info(formatted("SIGUSR2: wrote the last collectives to {}.", directory()));
}

void note_crash(const char* why) {
  const std::string* in = folder.load();
  if (in && write(Cause::kCrash, why)) announce_crash(*in, why);
}

}  // namespace

bool write(Cause cause, const char* why) noexcept {
  const std::string* in = folder.load();
  // A rank that is alone waits for nobody, but may be asked.
  const bool alone = owner.size < 2 && cause != Cause::kRequest;
  if (!in || alone || last_number() < first_number() || !lock_file()) return false;
  bool written = false;
  if (!fault_written.load()) {
    written = write_file(*in, cause, why);
    if (written && cause != Cause::kRequest) fault_written = true;
  }
  if (written) rank_status::add_report(in->c_str());
  writing.clear();
  return written;
}

void join(int rank, int size, const std::string& run) {
  lock_file();  // a report about the world before may be under way
  owner.rank = rank;
  owner.size = size;
  keep(owner.run, run);
  keep(owner.identity, host_identity());
  if (gethostname(owner.host, sizeof owner.host - 1) != 0) owner.host[0] = 0;
  fault_written = false;
  forget();
  writing.clear();
  set_directory(environment::text("FSDP_FLIGHT_DIR").value_or("fsdp-flight/" + run));
  crash::install({.crashed = note_crash, .asked = answer_request});
  rank_status::set_answers(crash::answers());
}

void set_directory(const std::string& directory) {
  std::string path = directory;
  char current[PATH_MAX];
  if (!path.starts_with('/') && getcwd(current, sizeof current)) {
    path = std::string(current) + "/" + path;
  }
  folder = new std::string(std::move(path));
}

std::string directory() {
  const std::string* in = folder.load();
  return in ? *in : "";
}

}  // namespace fsdp::comm::flight
