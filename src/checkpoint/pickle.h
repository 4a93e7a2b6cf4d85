// Pickle: reads and writes the format of Python's pickle module.
//
// The reader knows the opcodes that protocols 2 to 5 use for data and the classes that the caller
// allows by name; everything else is an Error. Classes are never looked up and nothing is ever
// called: an object is its class's name, the arguments and the state. Every length is checked
// against the input, nesting is limited, and values can't contain themselves.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "fsdp/error.h"

namespace fsdp::checkpoint::pickle {

struct Pickled;
using Ref = std::shared_ptr<const Pickled>;

enum PickledKind {
  kNone,
  kBoolean,
  kInteger,
  kReal,
  kString,
  kBytes,
  kList,
  kTuple,
  kDict,
  kClass,       // or a function: a name, as in "torch.Size"
  kObject,      // what calling the class would return
  kPersistent,  // something outside of the pickle, by id
};

struct Pickled {  // a value in a pickle
  PickledKind kind = kNone;
  int64_t integer = 0;  // kBoolean, kInteger
  double real = 0;
  std::string text;        // kString, kBytes; kClass and kObject: the class's name
  std::vector<Ref> items;  // kList, kTuple; kDict: key, value, key, …; kPersistent: the id;
                           // kObject: its arguments as one tuple
  Ref state;               // kObject: its state; null if none was set
  int depth = 1;           // nesting depth, including this value
  bool closed = false;     // referenced by others: can't be filled any more

  bool is(PickledKind what) const { return kind == what; }
  // The value of a string key in a dict; null if there is none.
  const Pickled* find(std::string_view key) const;
  const std::vector<Ref>& arguments() const { return items.front()->items; }  // of an object
};

const char* name(PickledKind kind);

// A pickle refers to a class that isn't allowed.
class UnknownClass : public Error {
 public:
  using Error::Error;
};

using Allowed = std::function<bool(const std::string& name)>;

// `where` names the input in errors ("run/.metadata").
Ref read(std::string_view bytes, const std::string& where, const Allowed& allowed);

// Writes protocol 2, one opcode per call; Python's pickletools documents them. Repeated strings and
// classes are written once.
class Writer {
 public:
  Writer();
  void none();
  void boolean(bool value);
  void integer(int64_t value);
  void real(double value);
  void string(std::string_view value);
  void global(const std::string& module, const std::string& name);  // a class or function
  void empty_tuple();
  void empty_list();
  void empty_dict();
  void mark();
  void tuple();       // of everything since the mark
  void append_all();  // everything since the mark, to the list below it
  void set_all();     // keys and values since the mark, to the dict below it
  void new_object();  // of a class and a tuple of arguments
  void call();        // of a function and a tuple of arguments
  void build();       // fills the object below with the state on top
  void persistent();  // the value on top is an id
  std::string finish();

 private:
  bool known(const std::string& key);  // if so, pushes it from the memo
  void remember(const std::string& key);
  void little(uint64_t value, int bytes);

  std::string out_;
  std::unordered_map<std::string, uint32_t> memo_;
};

}  // namespace fsdp::checkpoint::pickle
