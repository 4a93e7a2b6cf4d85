// Pickles of the flight recorder: protocol 2, written to a file through a buffer on the stack.
//
// All of it is async-signal-safe: no memory is allocated. Values are written in order; a dict is
// dict(), mark(), keys and values, set_all(); a list is list(), mark(), values, append_all().
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace fsdp::comm::flight {

// Keys of entries.
enum Key : uint8_t {
  kRecordId,
  kPgId,
  kProcessGroup,
  kCollectiveSeqId,
  kP2pSeqId,
  kOpId,
  kProfilingName,
  kTimeCreated,
  kInputSizes,
  kInputDtypes,
  kOutputSizes,
  kOutputDtypes,
  kState,
  kTimeStarted,
  kTimeCompleted,
  kRetired,
  kTimeout,
  kIsP2p,
  kThreadId,
  kFrames,
  kName,
  kFilename,
  kLine,
  kOperation,
  kReduce,
  kRoot,
  kPath,
  kIdentity,
  kCount,
  kLabel,
  kDevice,
  kStream,
  kStep,
  kFailed,
  kKeys
};

class PickleFile {
 public:
  explicit PickleFile(int file);

  void dict() { op('}'); }
  void list() { op(']'); }
  void mark() { op('('); }
  void set_all() { op('u'); }
  void append_all() { op('e'); }
  void pair() { op(static_cast<char>(0x86)); }  // of the two values before
  void none() { op('N'); }
  void boolean(bool value) { op(static_cast<char>(value ? 0x88 : 0x89)); }
  void integer(int64_t value);
  // What isn't UTF-8 becomes question marks, or Python couldn't read the file.
  void text(std::string_view value);

  // A key of entries. It is written once and then fetched from the pickle's memo.
  void key(Key key);

  // Keys and values.
  void item(const char* key, std::string_view value) { text(key), text(value); }
  void item(const char* key, int64_t value) { text(key), integer(value); }
  void item(Key key, std::string_view value) { this->key(key), text(value); }
  void item(Key key, int64_t value) { this->key(key), integer(value); }

  bool finish();  // false: something couldn't be written

 private:
  void op(char code) { byte(static_cast<unsigned char>(code)); }
  void byte(unsigned char value);
  void little(uint64_t value, int bytes);
  void flush();

  const int file_;
  bool good_ = true;
  bool known_[kKeys] = {};
  char buffer_[4096];
  size_t used_ = 0;
};

}  // namespace fsdp::comm::flight
