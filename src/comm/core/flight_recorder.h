// Flight recorder: the last collectives of this process, for the question who hangs where and why.
//
// Every backend records its calls here: what was called, for which unit, when it was issued, begun
// and finished. The ring is fixed memory; a record costs three looks at the clock and no lock. It
// is written to DIRECTORY/rank-N (comm/core/flight_file.cpp) when a collective fails, when the
// process crashes and on SIGUSR2, in the format of PyTorch's flight recorder: torchfrtrace reads
// it, and so does `fsdp hang`. Where nothing happens no file is written.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/core/description.h"

namespace fsdp::comm::flight {

inline constexpr uint64_t kKept = 2000;  // records

// A communicator, as the recorder knows it. It stays for as long as the process.
struct Group {
  std::string name;
  std::string backend;
  std::string ranks;  // of the world: "[0, 2]"
  int size = 0;
  std::atomic<uint64_t> issued{0}, started{0}, completed{0};  // numbers of the last calls
  Group* next = nullptr;                                      // the one made before
};

// A second communicator of one name is recorded as NAME#2.
Group* add_group(const std::string& name, const std::string& backend,
                 const std::vector<int>& ranks);
const Group* last_group();
// What was recorded so far is of an earlier world: it isn't written, and its names are free again.
void forget();

struct Amounts {  // elements on this rank
  int64_t in = 0, out = 0;
};
Amounts amounts_of(const Description& what, int size);

struct Place {
  int device = -1;  // -1: the CPU
  uint64_t stream = 0;
};

struct Record {
  uint64_t number = 0;  // counts from 1, over all communicators
  const Group* group = nullptr;
  uint64_t sequence = 0;  // of the call on its communicator, from 1 on; 0: making it
  Description what;
  Amounts amounts;
  Place place;
  int64_t timeout_ms = 0;
  int64_t step = 0;    // of the run; 0: unknown
  int32_t thread = 0;  // that issued it
  // Unix, in ns. 0: not yet. On a GPU a call has begun once those before it have finished, and its
  // end is seen up to 100 ms later.
  int64_t issued_ns = 0, started_ns = 0, ended_ns = 0;
  bool failed = false;
};

// --- for backends; any thread ---

// Each returns or takes the number of a record. 0, of a null group, is ignored. `making`: ranks
// meet to make the communicator.
uint64_t issued(Group* group, const Description& what, Amounts amounts,
                std::chrono::milliseconds timeout, Place place = {}, bool making = false);
void started(uint64_t number);
void finished(uint64_t number, bool failed = false);

// Time that this process's collectives have waited for other ranks, on any thread.
void add_wait(std::chrono::nanoseconds time);
std::chrono::nanoseconds waited();

// --- for readers; any thread, and signal handlers ---

uint64_t first_number();  // since forget()
uint64_t last_number();
bool read(uint64_t number, Record& record);  // false: overwritten, or being written

// --- the file ---

// This process joins a world. `run` tells runs apart: it is the same on all ranks. Handles crashes
// and SIGUSR2 from now on. Files go to FSDP_FLIGHT_DIR, or fsdp-flight/RUN in the current folder.
void join(int rank, int size, const std::string& run);
void set_directory(const std::string& directory);
std::string directory();  // empty: this process has joined no world

enum class Cause {
  kFault,    // a collective failed
  kCrash,    // called in a signal handler
  kRequest,  // nothing has failed yet
};

// Writes the file. False: there is nothing to write, it can't be written, or a fault has written it
// already: what comes after the first fault follows from it. Async-signal-safe.
bool write(Cause cause, const char* why) noexcept;

}  // namespace fsdp::comm::flight
