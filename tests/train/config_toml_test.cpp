// TOML: what configs may contain, what is refused, and that written configs parse to the same
// values.
#include <cmath>
#include <cstring>
#include <random>

#include "train/config_ready.h"
#include "train/config_testing.h"
#include "train/config_toml.h"
#include "train/config_write.h"

namespace fsdp::train {
namespace {

TEST(Toml, ReadsWhatAConfigNeeds) {
  Config config = from_text(
      "\xEF\xBB\xBF# first\r\n"
      "dir = 'C:\\x#y' # a # b\r\n"
      "model.dim = 0x1_00\n"
      "  [ optim ]  # [not] a = header\n"
      "\tlr=1_0e-0_4\n"
      "\"beta1\" = 0.5\n"
      "weight_decay = 1\n"
      "[data]\n"
      "train = [ # why\n"
      "  \"a, b\", 'c] # d',\n"
      "\n"
      "  \"\\u00e9\\U0001F600\\t\\\"\\\\\",\n"
      "]\n"
      "valid = []\n"
      "shuffle = false\n"
      "[train]\n"
      "tokens = 2e9\n"
      "seed = +5\n"
      "sample_prompt = \"x = 1 # no comment\"\n"
      "[shard]\n"
      "precision = \"bf16\"\n");
  EXPECT_EQ(config.dir, "C:\\x#y");
  EXPECT_EQ(config.model.dim, 256);
  EXPECT_EQ(config.optim.lr, 10e-4);
  EXPECT_EQ(config.optim.beta1, 0.5);
  EXPECT_EQ(config.optim.weight_decay, 1.0);
  EXPECT_EQ(config.data.train, (Words{"a, b", "c] # d", "é😀\t\"\\"}));
  EXPECT_EQ(config.data.valid, Words{});
  EXPECT_FALSE(config.data.shuffle);
  EXPECT_EQ(config.train.tokens, 2'000'000'000);
  EXPECT_EQ(config.train.seed, 5);
  EXPECT_EQ(config.train.sample_prompt, "x = 1 # no comment");
  EXPECT_EQ(config.shard.precision, shard::Precision::kBf16);
  config = from_text("optim = {lr = 0.5, schedule = \"wsd\"}\ndata = {train = ['a']}");
  EXPECT_EQ(config.optim.lr, 0.5);
  EXPECT_EQ(config.optim.schedule, optim::ScheduleType::kWsd);
  EXPECT_EQ(config.data.train, Words{"a"});
}

TEST(Toml, RefusesTheRestWithItsLine) {
  auto check = [](const std::string& text, const std::string& part) {
    EXPECT_TRUE(has(refused_file(text), part)) << text;
  };
  check("\n\nlr", "my.toml:3: a = is missing after \"lr\".");
  check("dir = x", "my.toml:1: \"x\" isn't a number");
  check("dir = \"a\" \"b\"", "unexpected \"\"b\"\"");
  check("dir = \"a\" seed = 1", "unexpected \"seed = 1\" at the end of the line");
  check("dir = \"a", "isn't closed in its line");
  check("dir = \"a\nb\"", "my.toml:1: a string isn't closed");
  check("dir = \"\\x\"", "\\x isn't a valid escape");
  check("dir = \"\\u12\"", "isn't followed by the 4 hexadecimal digits");
  check("dir = \"\\uD800\"", "isn't followed by");
  check("dir = \"\\U00110000\"", "isn't followed by");
  check("dir = \"a\x01\"", "control character");
  check("# a\x07", "control character");
  check("dir = \"\"\"a\"\"\"", "multi-line strings");
  check("dir = '''a'''", "multi-line strings");
  check("dir = é", "my.toml:1: \"é\" isn't ASCII, but isn't in a string.");
  check("dir = \"\xff\"", "my.toml:1: the file isn't valid UTF-8.");
  check("\n# \xe2\x82", "my.toml:2: the file isn't valid UTF-8.");
  check("dir = \"a\"\rresume = true", "a line ends in \\r without \\n.");
  check("dir =", "a value is missing");
  check("= 1", "a key is missing");
  check("a b = 1", "a = is missing after \"a\"");
  check("[optim", "a ] is missing");
  check("[optim] x", "unexpected \"x\"");
  check("[[optim]]", "arrays of tables");
  check("[]", "a key is missing");
  check("optim = {lr = 1, lr = 2}", "\"lr\" is already set.");
  check("optim = {lr = 1\n}", "the table in braces isn't valid");
  check("optim = {lr = 1}\n[optim]\nbeta1 = 0", "my.toml:2: [optim] is already in line 1.");
  check("dir = {}", "dir is {}, but dir takes a string.");
  check("optim = {}", "there is no key \"optim\" outside all sections.");
  check("optim.lr = {x = 1}", "there is no key \"x\" in [optim.lr].");
  check("[data]\ntrain = [\"a\"\n\"b\"]", "my.toml:3: a comma or ] is missing");
  check("[data]\ntrain = [\"a\",\n", "that begins in line 2 isn't closed");
  check("[data]\ntrain = [\"a\",\n[optim]\nlr = 1",
        "my.toml:3: \"optim]\" isn't a quoted string. | the list that begins in line 2 contains");
  check("[data]\ntrain = [1]", "isn't a quoted string");
  check("[model]\ndim = 0x1\"\u01C7\"", "a quote is in the middle of a word");  // UB in toml++ 3.3
  check("[model]\ndim = 1.\"\u01C7\"", "a quote is in the middle of a word");
  check("[data]\ntrain = [[\"a\"]]", "isn't a quoted string");
  check("[data]\ntrain = [,]", "isn't a quoted string");
  check("[train]\nseed = 1\nbatch = 2\nseed = 3", "my.toml:4: \"seed\" is already set in line 2.");
  check("train.seed = 1\n[train]\nseed = 1", "my.toml:2: [train] is already in line 1.");
  check("[train]\n[model]\n[train]\n", "my.toml:3: [train] is already in line 1.");
  check("[train]\nseed = 2020-01-01", "isn't a number");
  check("[train]\nseed = 01", "\"01\" isn't a number");
  check("[train]\nseed = 1__0", "isn't a number");
  check("[train]\nseed = _1", "isn't a number");
  check("[optim]\nlr = 1.", "isn't a number");
  check("[optim]\nlr = .5", "isn't a number");
  check("[optim]\nlr = 1e", "isn't a number");
  check("[optim]\nlr = 1e999", "1e999 doesn't fit in 64 bits.");
  check("[optim]\nlr = 1e-999", "1e-999 doesn't fit in 64 bits.");
  check("[train]\nseed = 9223372036854775808", "9223372036854775808 doesn't fit in 64 bits.");
  check("[train]\nseed = 12:30:00", "\"12:30:00\" isn't a number");
  check("[optim]\nlr = 0x1.8p1", "isn't a number");
  check("[data]\nshuffle = True", "\"True\" isn't a number, true or false.");
}

TEST(Toml, RefusesWhatIsTooDeepOrTooLong) {
  std::string key = "a", list;
  for (int i = 0; i < 100'000; ++i) key += ".a", list += "[";
  EXPECT_TRUE(has(refused_file("dir = \"x\"\n" + key + " = 1"), "my.toml:2: a key has more than"));
  EXPECT_TRUE(has(refused_file("[" + key + "]"), "a key has more than"));
  EXPECT_TRUE(has(refused_file("x = {" + key + " = 1}"), "a key has more than"));
  EXPECT_TRUE(has(refused_file("x = " + list), "nested too deeply"));
  EXPECT_TRUE(has(refused_file("# " + std::string(17 << 20, 'x')), "too many for a config"));
  EXPECT_EQ(from_text("dir = \"" + key + "\" # " + key).dir, key);
}

TEST(Toml, AWrongTypeSaysWhatIsExpectedAndWhere) {
  auto check = [](const std::string& text, const std::string& part) {
    EXPECT_TRUE(has(refused_file(text), part)) << text;
  };
  check("[optim]\n\nlr = \"fast\"",
        "my.toml:3: lr is \"fast\", but optim.lr takes a number of at least 0.");
  check("[optim]\nlr = true", "takes a number");
  check("[optim]\nlr = inf", "takes a number");
  check("[optim]\nlr = [\"1\"]", "takes a number");
  check("[model]\ndim = 0.5", "takes an integer from 1 to 1000000.");
  check("[model]\ntied = 1", "takes true or false");
  check("[model]\ntied = \"true\"", "takes true or false");
  check("[model]\ntype = \"lama\"", "did you mean llama?");
  check("[model]\ntype = 1",
        "takes one of llama, qwen2, qwen3, mistral, smollm3, olmo2, phi3, gemma3, mixtral, "
        "qwen3_moe, olmoe, dots1, gpt2, mlp.");
  check("[data]\ntrain = \"a.bin\"", "takes a list of strings");
  check("dir = 1", "takes a string");
  check("[train]\nsteps = 1e17", "takes an integer");
}

TEST(Toml, ATextThatMayBeANumberNeedsNoQuotes) {
  auto reshard = [](const std::string& value) {
    return enum_name(
        from_text("[shard]\nreshard_after_forward = " + value).shard.reshard_after_forward);
  };
  EXPECT_EQ(reshard("4"), "4");
  EXPECT_EQ(reshard("true"), "true");
  EXPECT_EQ(reshard("\"auto\""), "auto");
  EXPECT_EQ(reshard("\"4\""), "4");
  EXPECT_TRUE(has(refused_file("[shard]\nreshard_after_forward = 1.5"), "takes one of auto"));
}

TEST(Toml, AnUnknownKeyNamesTheNearestAndItsSection) {
  auto check = [](const std::string& text, const std::string& part) {
    EXPECT_TRUE(has(refused_file(text), part)) << text;
  };
  check("[optim]\nlrr = 1", "my.toml:2: there is no key \"lrr\" in [optim]. | did you mean lr?");
  check("[train]\nlr = 1", "there is no key \"lr\" in [train]. | lr belongs to [optim].");
  check("lr = 1", "there is no key \"lr\" outside all sections. | lr belongs to [optim].");
  check("[train]\ndir = \"x\"", "dir must come before the first [section].");
  check("[model]\nkvheads = 1", "did you mean kv_heads?");
  check("[model.rope]\nbase = 1", "there is no section [model.rope]");
  check("model.rope.base = 1", "there is no key \"base\" in [model.rope].");
  check("[optimizer]\n", "my.toml:1: there is no section [optimizer].");
  check("[modle]\n", "there is no section [modle]. | did you mean [model]?");
  check("[model]\nxyzzyxyzzy = 1", "docs/config.md lists every key.");
}

TEST(Toml, NumbersReadAsWritten) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    uint64_t bits = random();
    double value;
    std::memcpy(&value, &bits, sizeof value);
    if (!std::isfinite(value)) continue;
    auto read = parse_toml_number(toml_number(value));
    ASSERT_TRUE(std::holds_alternative<double>(read)) << toml_number(value);
    ASSERT_EQ(std::memcmp(&std::get<double>(read), &value, sizeof value), 0) << toml_number(value);
  }
  EXPECT_EQ(toml_number(3e-4), "3e-4");
  EXPECT_EQ(toml_number(0.02), "0.02");
  EXPECT_EQ(toml_number(1e-5), "1e-5");
  EXPECT_EQ(toml_number(1e30), "1e30");
  EXPECT_EQ(toml_number(-0.0), "-0.0");
  EXPECT_EQ(toml_number(1), "1.0");
  EXPECT_EQ(std::get<int64_t>(parse_toml_number("-9223372036854775808")), INT64_MIN);
  EXPECT_EQ(std::get<int64_t>(parse_toml_number("0b1_01")), 5);
  EXPECT_EQ(std::get<int64_t>(parse_toml_number("0o17")), 15);
  for (const char* word :
       {"",     "-",        "+",   "0x",         "0xG",  "-0x1",     "1_",   "e1",
        "1e+",  "1.e1",     "--1", "1 ",         " 1",   "infinity", "00.5", "9223372036854775808",
        "true", "1\na = 2", "1#",  "2020-01-01", "\"1\""})
    EXPECT_TRUE(std::holds_alternative<std::monostate>(parse_toml_number(word))) << word;
}

// --- written configs parse back ---

// A value that the option takes, at random.
void randomize(const Option& option, std::mt19937_64& random) {
  auto text = [&] {
    std::string out;
    for (int64_t n = random() % 12; n > 0; --n)
      out += Words{"a", "#", "\"", "\\", "\n", "\r",   "\t",   "'", "=",
                   "[", "]", ",",  "é",  "😀",  "\x01", "\x7f", " "}[random() % 17];
    return out;
  };
  double least = std::max(option.check.least, -1e6), most = std::min(option.check.most, 1e6);
  double share = static_cast<double>(random() >> 11) / 9007199254740992.0;
  double between = least + (most - least) * share * share * share;
  if (auto* flag = std::get_if<bool*>(&option.target)) **flag = random() % 2;
  if (auto* number = std::get_if<int64_t*>(&option.target))
    **number = static_cast<int64_t>(std::ceil(between));
  if (auto* number = std::get_if<double*>(&option.target)) **number = between;
  if (auto* word = std::get_if<std::string*>(&option.target)) **word = text();
  if (auto* field = std::get_if<EnumField>(&option.target)) {
    Words names = field->names();
    if (field->takes_number()) names.push_back(std::to_string(2 + random() % 100));
    EXPECT_TRUE(field->set(names[random() % names.size()])) << option.name();
  }
  if (auto* list = std::get_if<std::vector<std::string>*>(&option.target)) {
    (*list)->clear();
    for (size_t n = random() % 4; n > 0; --n) (*list)->push_back(text());
  }
}

TEST(ToToml, AnyConfigReadsBackToTheBit) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    Config config;
    for (const Option& option : options(config)) randomize(option, random);
    std::string text = to_toml(config);
    ASSERT_EQ(differences(from_text(text), config), Words{}) << text;
  }
}

TEST(ToToml, EveryReadyConfigReadsBack) {
  for (const ReadyConfig& ready : ready_configs()) {
    Config config = from_text(std::string(ready.text));
    EXPECT_EQ(differences(from_text(to_toml(config)), config), Words{}) << ready.name;
  }
}

}  // namespace
}  // namespace fsdp::train
