// Our pickle against Python's own, and against hostile pickles.
#include "checkpoint/pickle.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <sstream>

#include "base/subprocess.h"

namespace fsdp::checkpoint::pickle {
namespace {

std::string python() {
  const char* given = std::getenv("FSDP_TEST_PYTHON");
  return given ? given : "python3";
}

std::vector<std::string> lines_of(const std::string& program) {
  const auto finished = run_program({python(), "-c", program}, /*quiet=*/false);
  EXPECT_EQ(finished.code, 0);
  std::vector<std::string> lines;
  std::istringstream in(finished.output);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return bytes;
}

std::string to_hex(const std::string& bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  for (unsigned char c : bytes) {
    hex += kDigits[c >> 4];
    hex += kDigits[c & 15];
  }
  return hex;
}

// The value as a text that both sides can produce. kShow is the same in Python.
std::string show(const Pickled& value) {
  std::string inside;
  for (const auto& item : value.items) inside += show(*item) + ",";
  switch (value.kind) {
    case kNone:
      return "None";
    case kBoolean:
      return value.integer ? "True" : "False";
    case kInteger:
      return std::to_string(value.integer);
    case kReal: {
      char text[64];
      std::snprintf(text, sizeof text, "%.17g", value.real);
      return text;
    }
    case kString:
      return "s" + to_hex(value.text);
    case kBytes:
      return "b" + to_hex(value.text);
    case kList:
      return "[" + inside + "]";
    case kTuple:
      return "(" + inside + ")";
    case kDict:
      return "{" + inside + "}";
    case kClass:
      return "<" + value.text + ">";
    case kObject:
      return value.text + inside + (value.state ? show(*value.state) : std::string());
    case kPersistent:
      return "@" + inside;
  }
  return "?";
}

const char* const kShow = R"(
def show(v):
    if v is None or isinstance(v, bool): return str(v)
    if isinstance(v, int): return str(v)
    if isinstance(v, float): return '%.17g' % v
    if isinstance(v, str): return 's' + v.encode().hex()
    if isinstance(v, bytes): return 'b' + v.hex()
    if isinstance(v, list): return '[' + ''.join(show(i) + ',' for i in v) + ']'
    if isinstance(v, tuple): return '(' + ''.join(show(i) + ',' for i in v) + ')'
    if isinstance(v, dict): return '{' + ''.join(show(k) + ',' + show(i) + ',' for k, i in v.items()) + '}'
    if isinstance(v, type): return '<' + v.__module__ + '.' + v.__qualname__ + '>'
)";

Ref read_any(const std::string& bytes) {
  return read(bytes, "here", [](const std::string&) { return true; });
}

std::string error_of(const std::string& bytes) {
  try {
    read(bytes, "here", [](const std::string& name) { return name == "torch.Size"; });
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Pickle, ReadsWhatPythonWritesInEveryProtocolFromTwo) {
  const auto lines = lines_of(std::string("import pickle, collections, fractions\n") + kShow + R"(
values = [None, True, False, 0, 1, -1, 255, 256, 65535, 65536, 2**31-1, -2**31, 2**31, 2**62,
          -2**63, 0.0, -1.5, 1e300, float('inf'), '', 'text', 'grüße \U0001f600', 'x' * 300, b'',
          b'\x00\xff', b'y' * 300, [], (), {}, (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4),
          [1, [2, [3, ()]], {'a': {'b': (None,)}}], {'k': 'k', 1: [2.5], (1, 'k'): 'k'},
          list(range(2500)), {i: str(i) for i in range(2500)}, ['same'] * 3,
          collections.OrderedDict(a=1, b=[2]), fractions.Fraction, 'z' * 70000]
shared = ('shared', 1); values.append([shared, shared, {'again': shared}])
for v in values:
    for protocol in range(3 if isinstance(v, bytes) else 2, 6):
        print(pickle.dumps(v, protocol).hex()); print(show(v)))");
  ASSERT_EQ(lines.size(), (42u * 4 - 3) * 2);
  for (size_t i = 0; i < lines.size(); i += 2)
    EXPECT_EQ(show(*read_any(from_hex(lines[i]))), lines[i + 1]) << lines[i].substr(0, 200);
}

TEST(Pickle, ReadsObjectsAsClassArgumentsAndState) {
  const auto lines = lines_of(R"(
import pickle, dataclasses, enum, sys
module = type(sys)('torch'); sys.modules['torch'] = module
class Size(tuple):
    def __reduce__(self): return (Size, (tuple(self),))
@dataclasses.dataclass
class Chunk:
    offsets: Size
    other: int = 3
for c in (Size, Chunk): c.__module__ = 'torch'; setattr(module, c.__name__, c)
for protocol in range(2, 6): print(pickle.dumps([Chunk(Size((4, 2))), Chunk(Size(()))], protocol).hex()))");
  ASSERT_EQ(lines.size(), 4u);
  for (const auto& line : lines) {
    const auto list = read_any(from_hex(line));
    ASSERT_EQ(list->items.size(), 2u);
    const Pickled& chunk = *list->items[0];
    EXPECT_EQ(chunk.text, "torch.Chunk");
    EXPECT_TRUE(chunk.arguments().empty());
    EXPECT_EQ(chunk.state->find("other")->integer, 3);
    EXPECT_EQ(chunk.state->find("nothing"), nullptr);
    const Pickled* offsets = chunk.state->find("offsets");
    EXPECT_EQ(offsets->text, "torch.Size");
    EXPECT_EQ(show(*offsets->arguments()[0]), "(4,2,)");
  }
}

TEST(Pickle, PythonReadsWhatWeWrite) {
  std::vector<std::string> pickles, shown;
  const auto add = [&](const std::function<void(Writer&)>& put) {
    Writer writer;
    put(writer);
    pickles.push_back(writer.finish());
    shown.push_back(show(*read_any(pickles.back())));  // and so do we
  };
  constexpr auto kMost = std::numeric_limits<int64_t>::max();
  for (int64_t number :
       {int64_t{0}, int64_t{255}, int64_t{256}, int64_t{65536}, int64_t{-1}, int64_t{1} << 31,
        -(int64_t{1} << 31), -(int64_t{1} << 31) - 1, kMost, -kMost - 1})
    add([&](Writer& writer) { writer.integer(number); });
  for (double number : {0.0, -2.5, 1e-300, 0.1}) add([&](Writer& writer) { writer.real(number); });
  for (const std::string text : {"", "text", "grüße"})
    add([&](Writer& writer) { writer.string(text); });
  add([](Writer& writer) { writer.none(); });
  add([](Writer& writer) { writer.boolean(true); });
  add([](Writer& writer) { writer.global("fractions", "Fraction"); });
  add([](Writer& writer) {  // [(), {"k": [False]}, and 600 strings that come twice]
    writer.empty_list();
    writer.mark();
    writer.empty_tuple();
    writer.empty_dict();
    writer.mark();
    writer.string("k");
    writer.mark();
    writer.boolean(false);
    writer.tuple();
    writer.set_all();
    for (int i = 0; i < 1200; ++i) writer.string("name " + std::to_string(i % 600));
    writer.append_all();
  });
  std::string program = std::string("import pickle, pickletools, io\n") + kShow + "for h in '";
  for (const auto& bytes : pickles) program += to_hex(bytes) + " ";
  program +=
      "'.split():\n    b = bytes.fromhex(h); pickletools.dis(b, io.StringIO())\n"
      "    print(show(pickle.loads(b)))";
  EXPECT_EQ(lines_of(program), shown);
  EXPECT_EQ(shown[0], "0");
  EXPECT_LT(pickles.back().size(), 15000u);  // repeated strings are written once
}

// --- hostile pickles ---

TEST(HostilePickle, ClassesThatAreNotAllowedAreRefusedByName) {
  for (const auto& line : lines_of(R"(
import pickle, os, subprocess, builtins
class Run:
    def __reduce__(self): return (os.system, ('touch /tmp/fsdp-was-run',))
class Eval:
    def __reduce__(self): return (eval, ('1',))
for v, name in ((Run(), 'system'), (Eval(), 'eval'), (os.path.join, 'join'), (Run, 'Run')):
    for protocol in range(2, 6): print(pickle.dumps(v, protocol).hex(), name))")) {
    const size_t space = line.find(' ');
    const std::string error = error_of(from_hex(line.substr(0, space)));
    EXPECT_NE(error.find("." + line.substr(space + 1) + "\", which isn't allowed"),
              std::string::npos)
        << error;
  }
  EXPECT_NE(error_of("\x80\x02"
                     "cbuiltins\nexec\n)R."),
            "");
  EXPECT_NE(error_of("\x80\x02ctorch\nSize.__class__\n."), "");
}

TEST(HostilePickle, UnsupportedOpcodesAreRefused) {
  // Old-style instances, extension codes, text numbers, sets, text persistent ids, duplicates.
  for (const char opcode :
       {'i', 'o', '\x82', '\x83', '\x84', 'I',    'L',    'F',    'V',    'S', 'P',
        '2', '1', '\x8f', '\x90', '\x91', '\x92', '\x96', '\x97', '\x98', '\0'})
    EXPECT_NE(error_of(std::string("\x80\x02N") + opcode + "...........\n\n.").find("opcode"),
              std::string::npos)
        << static_cast<int>(opcode);
}

TEST(HostilePickle, EveryTruncatedPickleIsAnError) {
  Writer writer;
  writer.global("torch", "Size");
  writer.mark();
  writer.mark();
  writer.integer(70000);
  writer.integer(int64_t{1} << 40);
  writer.string("text");
  writer.real(1.5);
  writer.tuple();
  writer.tuple();
  writer.call();
  const std::string whole = writer.finish();
  EXPECT_EQ(error_of(whole), "");
  for (size_t length = 0; length < whole.size(); ++length)
    EXPECT_NE(error_of(whole.substr(0, length)), "") << length;
  // Any changed byte gives an error or another value, but never a crash.
  for (size_t at = 0; at < whole.size(); ++at)
    for (int byte = 0; byte < 256; ++byte) {
      std::string changed = whole;
      changed[at] = static_cast<char>(byte);
      error_of(changed);
    }
}

TEST(HostilePickle, LengthsBeyondTheInputAreErrors) {
  using namespace std::string_literals;
  for (const auto& bytes :
       {"\x80\x02X\xff\xff\xff\xff."s, "\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff."s,
        "\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f."s,
        "\x80\x02"
        "B\x10\0\0\0."s,
        "\x80\x02\x8a\xff."s, "\x80\x02\x8a\x09\1\1\1\1\1\1\1\1\1."s, "\x80\x06N."s})
    EXPECT_NE(error_of(bytes), "");
}

TEST(HostilePickle, StacksAndMarksThatDoNotMatchAreErrors) {
  for (const std::string bytes :
       {"\x80\x02.", "\x80\x02NN.", "\x80\x02(.", "\x80\x02t.", "\x80\x02)R.", "\x80\x02NNR.",
        "\x80\x02]s.", "\x80\x02}(Nu.", "\x80\x02}]e.", "\x80\x02N(ae.", "\x80\x02NNb.",
        "\x80\x02h\x05.", "\x80\x02j\x05\x05\x05\x05.", "\x80\x02q\x01.", "\x80\x02N(\x85.",
        "\x80\x02N\x86.", "\x80\x02]N\x93.", "\x80\x02Q.",
        "\x80\x02"
        "0."})
    EXPECT_NE(error_of(bytes), "") << to_hex(bytes);
}

TEST(HostilePickle, ValuesCannotContainThemselves) {
  EXPECT_NE(error_of("\x80\x02]q\x01h\x01"
                     "a."),
            "");  // l.append(l)
  EXPECT_NE(error_of("\x80\x02]q\x01(h\x01\x85"
                     "e."),
            "");                                       // l.append((l,))
  EXPECT_NE(error_of("\x80\x02}q\x01(Nh\x01u."), "");  // d[None] = d
  EXPECT_NE(error_of("\x80\x02]q\x01]q\x02(h\x01"
                     "eh\x02"
                     "a."),
            "");  // through another one
}

TEST(HostilePickle, NestingHasALimit) {
  EXPECT_EQ(error_of("\x80\x02N" + std::string(60, '\x85') + "."), "");
  EXPECT_NE(error_of("\x80\x02N" + std::string(100000, '\x85') + "."), "");
  std::string lists = "\x80\x02" + std::string(100000, ']') + std::string(99999, 'a') + ".";
  EXPECT_NE(error_of(lists), "");
}

TEST(HostilePickle, SharedValuesAreNotCopied) {
  // 40 levels, each a pair of the one before: copies would make 2^40 values.
  std::string bytes = "\x80\x02Nq";
  bytes += '\0';
  for (char level = 0; level < 40; ++level) {
    bytes += std::string("h") + level + "h" + level + "\x86q";
    bytes += static_cast<char>(level + 1);
    bytes += "0";
  }
  bytes += "0h\x28.";
  EXPECT_EQ(error_of(bytes), "");
}

}  // namespace
}  // namespace fsdp::checkpoint::pickle
