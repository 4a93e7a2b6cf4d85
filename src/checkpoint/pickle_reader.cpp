// The reading half of pickle.h: a stack machine over the opcodes of protocols 2 to 5.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "base/format.h"
#include "checkpoint/pickle.h"

namespace fsdp::checkpoint::pickle {
namespace {

constexpr int kDeepestValue = 64;
constexpr size_t kLongestClassName = 200;  // of a class

using Made = std::shared_ptr<Pickled>;

// A value may be filled until it is put into another one or fetched from the memo; after that it is
// closed. So no value can contain itself, and the computed depth stays valid.

class Machine {
 public:
  Machine(std::string_view bytes, const std::string& where, const Allowed& allowed)
      : bytes_(bytes), where_(where), allowed_(allowed) {}

  Ref run() {
    while (true) {
      const size_t at = position_;
      const auto opcode = static_cast<unsigned char>(take(1)[0]);
      if (opcode == '.') break;
      step(opcode, at);
    }
    if (stack_.size() != 1 || !marks_.empty()) fail("ends in the middle of a value");
    return stack_[0];
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(
        formatted("{}: the pickle {} (byte {} of {}).", where_, what, position_, bytes_.size()),
        "the file is damaged, or torch.distributed.checkpoint didn't write it.");
  }

  // --- input ---

  std::string_view take(uint64_t count) {
    if (count > bytes_.size() - position_) fail("ends too early");
    const auto taken = bytes_.substr(position_, count);
    position_ += count;
    return taken;
  }

  uint64_t little(int count) {
    const auto taken = take(count);
    uint64_t value = 0;
    for (int i = count - 1; i >= 0; --i) value = value << 8 | static_cast<unsigned char>(taken[i]);
    return value;
  }

  std::string_view line() {
    const size_t end = bytes_.find('\n', position_);
    if (end == std::string_view::npos) fail("ends too early");
    const auto taken = bytes_.substr(position_, end - position_);
    position_ = end + 1;
    return taken;
  }

  int64_t long_integer() {
    const auto count = little(1);
    if (count > 8) fail("has an integer of more than 64 bits");
    const auto taken = take(count);
    uint64_t value = 0;
    for (size_t i = 0; i < count; ++i)
      value |= static_cast<uint64_t>(static_cast<unsigned char>(taken[i])) << (8 * i);
    const bool negative = count > 0 && static_cast<unsigned char>(taken[count - 1]) >= 0x80;
    if (negative && count < 8) value |= ~uint64_t{0} << (8 * count);
    return static_cast<int64_t>(value);
  }

  double real() {
    const auto taken = take(8);
    uint64_t bits = 0;
    for (char c : taken) bits = bits << 8 | static_cast<unsigned char>(c);
    return std::bit_cast<double>(bits);
  }

  // --- the stack ---

  Made push(PickledKind kind) {
    auto value = std::make_shared<Pickled>();
    value->kind = kind;
    stack_.push_back(value);
    return value;
  }
  // None, True, False and (): one byte each in a pickle, so they share their memory.
  bool push_shared(PickledKind kind, int64_t integer) {
    Made& value = shared_[kind == kBoolean ? 1 + integer : kind == kTuple ? 3 : 0];
    if (!value) {
      value = std::make_shared<Pickled>();
      value->kind = kind;
      value->integer = integer;
      value->closed = true;
    }
    stack_.push_back(value);
    return true;
  }
  bool push_empty(PickledKind kind) { return push(kind) != nullptr; }
  bool push_integer(PickledKind kind, int64_t integer) {
    push(kind)->integer = integer;
    return true;
  }
  bool push_text(PickledKind kind, std::string_view text) {
    push(kind)->text = std::string(text);
    return true;
  }

  // Values above the last mark may be popped; without a mark, all of them.
  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }

  Made pop() {
    Made value = top();
    stack_.pop_back();
    return value;
  }

  std::vector<Made> pop_to_mark() {
    if (marks_.empty()) fail("lacks a mark");
    std::vector<Made> popped;
    for (size_t i = marks_.back(); i < stack_.size(); ++i) popped.push_back(std::move(stack_[i]));
    stack_.resize(marks_.back());
    marks_.pop_back();
    return popped;
  }

  const Made& top() const {
    if (stack_.size() <= floor()) fail("pops a value from an empty stack");
    return stack_.back();
  }

  Pickled& container(PickledKind kind) {
    const Made& value = top();
    if (!value->is(kind)) fail(formatted("fills a {}", name(value->kind)));
    if (value->closed) fail("fills a value that is already referenced");
    return *value;
  }

  void nest(Pickled& outer, Pickled& inner) {
    inner.closed = true;
    outer.depth = std::max(outer.depth, inner.depth + 1);
    if (outer.depth > kDeepestValue) fail("nests too deeply");
  }

  void add(Pickled& outer, Made inner) {
    nest(outer, *inner);
    outer.items.push_back(std::move(inner));
  }

  void make_tuple(std::vector<Made> items) {
    auto tuple = push(kTuple);
    tuple->items.reserve(items.size());
    for (auto& item : items) add(*tuple, std::move(item));
  }

  void make_tuple(int count) {
    std::vector<Made> items(count);
    for (int i = count - 1; i >= 0; --i) items[i] = pop();
    make_tuple(std::move(items));
  }

  void fill_list(std::vector<Made> items) {
    Pickled& list = container(kList);
    for (auto& item : items) add(list, std::move(item));
  }

  void fill_dict(std::vector<Made> items) {
    if (items.size() % 2 != 0) fail("has a key without a value");
    Pickled& dict = container(kDict);
    for (auto& item : items) add(dict, std::move(item));
  }

  std::vector<Made> pop_two() {
    auto second = pop();
    auto first = pop();
    return {first, second};
  }

  // --- classes and objects ---

  void push_class(std::string_view module, std::string_view attribute) {
    std::string full = std::string(module) + "." + std::string(attribute);
    if (!allowed_(full)) {
      std::string shown = full.substr(0, kLongestClassName);
      std::replace_if(
          shown.begin(), shown.end(), [](unsigned char c) { return c < 32 || c > 126; }, '?');
      throw UnknownClass(
          formatted("{}: the pickle refers to \"{}\", which isn't allowed here.", where_, shown),
          "the file is damaged or hostile, or holds objects of other programs; nothing in "
          "it was run.");
    }
    push_text(kClass, full);
  }

  void push_class_from_stack() {
    const auto both = pop_two();
    if (!both[0]->is(kString) || !both[1]->is(kString))
      fail("names a class by something that isn't a string");
    push_class(both[0]->text, both[1]->text);
  }

  void make_object() {
    const auto both = pop_two();
    if (!both[0]->is(kClass) || !both[1]->is(kTuple))
      fail("makes an object without a class and arguments");
    // An ordered dict is a dict to us, and is filled as one.
    if (both[0]->text == "collections.OrderedDict" && both[1]->items.empty()) {
      push(kDict);
      return;
    }
    auto object = push(kObject);
    object->text = both[0]->text;
    add(*object, both[1]);
  }

  void build() {
    auto state = pop();
    if (top()->is(kDict)) return;  // attributes of an ordered dict are ignored
    Pickled& object = container(kObject);
    if (object.state) fail("fills an object twice");
    nest(object, *state);
    object.state = std::move(state);
  }

  // --- the memo ---

  void put(uint64_t index) { memo_[index] = top(); }

  void get(uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) fail("reads an empty memo entry");
    found->second->closed = true;
    stack_.push_back(found->second);
  }

  bool push_value(unsigned char opcode);
  void step(unsigned char opcode, size_t at);

  std::string_view bytes_;
  const std::string& where_;
  const Allowed& allowed_;
  size_t position_ = 0;
  std::vector<Made> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, Made> memo_;
  std::array<Made, 4> shared_;  // see push_shared
};

// Pushes the value that an opcode stands for by itself. False: the opcode does something else.
bool Machine::push_value(unsigned char opcode) {
  switch (opcode) {
    case 'N':
      return push_shared(kNone, 0);
    case 0x88:
      return push_shared(kBoolean, 1);
    case 0x89:
      return push_shared(kBoolean, 0);
    case 'K':
      return push_integer(kInteger, static_cast<int64_t>(little(1)));
    case 'M':
      return push_integer(kInteger, static_cast<int64_t>(little(2)));
    case 'J':
      return push_integer(kInteger, static_cast<int32_t>(little(4)));
    case 0x8a:
      return push_integer(kInteger, long_integer());
    case 'G':
      push(kReal)->real = real();
      return true;
    case 'X':
      return push_text(kString, take(little(4)));
    case 0x8c:
      return push_text(kString, take(little(1)));
    case 0x8d:
      return push_text(kString, take(little(8)));
    case 'B':
      return push_text(kBytes, take(little(4)));
    case 'C':
      return push_text(kBytes, take(little(1)));
    case 0x8e:
      return push_text(kBytes, take(little(8)));
    case ')':
      return push_shared(kTuple, 0);
    case ']':
      return push_empty(kList);
    case '}':
      return push_empty(kDict);
    default:
      return false;
  }
}

void Machine::step(unsigned char opcode, size_t at) {
  if (push_value(opcode)) return;
  switch (opcode) {
    case 0x80:  // PROTO
      if (little(1) > 5) fail("has a protocol above 5");
      return;
    case 0x95: {  // FRAME: the length of what follows
      const auto length = little(8);
      if (length > bytes_.size() - position_) fail("ends too early");
      return;
    }
    case '(':
      return marks_.push_back(stack_.size());
    case 't':
      return make_tuple(pop_to_mark());
    case 0x85:
    case 0x86:
    case 0x87:
      return make_tuple(opcode - 0x84);
    case 'a':
      return fill_list({pop()});
    case 'e':
      return fill_list(pop_to_mark());
    case 's':
      return fill_dict(pop_two());
    case 'u':
      return fill_dict(pop_to_mark());
    case 'c': {
      const auto module = line();
      return push_class(module, line());
    }
    case 0x93:
      return push_class_from_stack();
    case 'R':
    case 0x81:
      return make_object();
    case 'b':
      return build();
    case 'Q': {
      auto id = pop();
      return add(*push(kPersistent), std::move(id));
    }
    case 'q':
      return put(little(1));
    case 'r':
      return put(little(4));
    case 0x94:
      return put(memo_.size());
    case 'h':
      return get(little(1));
    case 'j':
      return get(little(4));
    case '0':
      pop();
      return;
    default:
      position_ = at;
      fail(formatted("has the opcode {:#04x}, which isn't supported", opcode));
  }
}

}  // namespace

const char* name(PickledKind kind) {
  constexpr const char* kNames[] = {"None", "bool",  "int",  "float", "str",    "bytes",
                                    "list", "tuple", "dict", "class", "object", "persistent id"};
  return kNames[kind];
}

const Pickled* Pickled::find(std::string_view key) const {
  if (kind != kDict) return nullptr;
  for (size_t i = items.size(); i >= 2; i -= 2)  // the last one wins, as in Python
    if (items[i - 2]->kind == kString && items[i - 2]->text == key) return items[i - 1].get();
  return nullptr;
}

Ref read(std::string_view bytes, const std::string& where, const Allowed& allowed) {
  return Machine(bytes, where, allowed).run();
}

}  // namespace fsdp::checkpoint::pickle
