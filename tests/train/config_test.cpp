// The config of a run: options, flags, ready configs, and which value wins.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include "paths.h"
#include "train/config_check.h"
#include "train/config_ready.h"
#include "train/config_testing.h"
#include "train/config_write.h"
#include "train/recipe.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;

// --- options ---

// Counts the fields of an aggregate: as many values as it can be initialized with.
struct Anything {
  template <typename T>
  operator T() const;
};
template <typename T, typename... Values>
consteval size_t count_fields() {
  if constexpr (requires { T{Values{}..., Anything{}}; })
    return count_fields<T, Values..., Anything>();
  else
    return sizeof...(Values);
}

TEST(Options, AreTheFieldsOfConfigEachOnce) {
  Config config;
  std::map<std::string, size_t> described;
  std::set<std::string> names;
  std::set<const void*> fields;
  for (const Option& option : options(config)) {
    ++described[option.section];
    EXPECT_TRUE(names.insert(option.name()).second) << option.name();
    const void* field = nullptr;
    if (auto* named = std::get_if<EnumField>(&option.target)) field = named->address();
    std::visit(
        [&](const auto& target) {
          if constexpr (std::is_pointer_v<std::decay_t<decltype(target)>>) field = target;
        },
        option.target);
    EXPECT_TRUE(fields.insert(field).second) << option.name();
    EXPECT_FALSE(option.help.empty()) << option.name();
    EXPECT_FALSE(option.help.ends_with(".")) << option.name();
  }
  const std::map<std::string, size_t> declared = {
      {"", count_fields<Config>() - 15},  // fourteen are sections, one is what resume comes to
      {"model", count_fields<models::ModelConfig>()},
      {"context", count_fields<nn::ContextConfig>()},
      {"lora", count_fields<nn::LoRAConfig>()},
      {"data", count_fields<data::DataConfig>()},
      {"train", count_fields<TrainConfig>()},
      {"optim", count_fields<optim::OptimConfig>()},
      {"shard", count_fields<shard::ShardConfig>()},
      {"fp8", count_fields<nn::Fp8Config>()},
      {"activations", count_fields<memory::ActivationsConfig>()},
      {"offload", count_fields<memory::OffloadConfig>()},
      {"checkpoint", count_fields<checkpoint::CheckpointConfig>()},
      {"recovery", count_fields<RecoveryConfig>()},
      {"comm", count_fields<comm::CommConfig>()},
      {"log", count_fields<observe::LogConfig>()}};
  EXPECT_EQ(described, declared);
}

TEST(Options, DefaultsPassTheirOwnChecks) {
  Config config;
  std::string text = to_toml(config);
  EXPECT_EQ(differences(from_text(text), Config{}), Words{});
}

// --- flags ---

TEST(Flags, SetTheOptionTheyName) {
  Config config = resolved({"--optim.lr", "1e-4", "--model.dim=512", "--data.shuffle", "false",
                            "--optim.type", "sgd", "--seed", "7", "--dir", "runs/x"});
  EXPECT_EQ(config.optim.lr, 1e-4);
  EXPECT_EQ(config.model.dim, 512);
  EXPECT_FALSE(config.data.shuffle);
  EXPECT_EQ(config.optim.type, optim::OptimizerType::kSgd);
  EXPECT_EQ(config.train.seed, 7);
  EXPECT_EQ(config.dir, "runs/x");
}

TEST(Flags, ShortOnesMeanTheLongOnes) {
  EXPECT_EQ(resolved({"--steps", "5"}).train.steps, 5);
  EXPECT_EQ(resolved({"--tokens", "1e9"}).train.tokens, 1'000'000'000);
  EXPECT_EQ(resolved({"--tokens", "1_000_000"}).train.tokens, 1'000'000);
  EXPECT_EQ(resolved({"--epochs", "1.5"}).train.epochs, 1.5);
  EXPECT_EQ(resolved({"--batch", "64"}).train.batch, 64);
  EXPECT_TRUE(resolved({"--deterministic"}).train.deterministic);
  EXPECT_EQ(resolved({"demo", "--resume", "--dir", "x"}).resume, Resume::kYes);
}

TEST(Flags, ResumeIsASwitchThatAlsoTakesAuto) {
  const auto resume = [](const Words& more) {
    Words words = {"demo", "--dir", "x"};
    words.insert(words.end(), more.begin(), more.end());
    return resolved(words).resume;
  };
  EXPECT_EQ(resume({}), Resume::kNo);
  EXPECT_EQ(resume({"--resume"}), Resume::kYes);
  EXPECT_EQ(resume({"--resume", "--log.every", "1"}), Resume::kYes);
  for (const char* yes : {"true", "yes", "on", "1"})
    EXPECT_EQ(resume({"--resume", yes}), Resume::kYes);
  for (const char* no : {"false", "no", "off", "0"})
    EXPECT_EQ(resume({"--resume", no}), Resume::kNo);
  EXPECT_EQ(resume({"--resume", "auto"}), Resume::kAuto);
  EXPECT_EQ(resume({"--resume=auto"}), Resume::kAuto);
  EXPECT_TRUE(
      has(refused({"--dir", "x", "--resume=auto", "demo", "--resume=soon"}), "two configs"));
}

TEST(Flags, ASwitchTakesAWordOrNone) {
  for (const char* no : {"false", "no", "off", "0"})
    EXPECT_FALSE(resolved({"--data.shuffle", no}).data.shuffle) << no;
  for (const char* yes : {"true", "yes", "on", "1"})
    EXPECT_TRUE(resolved({"--data.loss_mask", yes}).data.loss_mask) << yes;
  EXPECT_TRUE(resolved({"--data.loss_mask", "--seed", "3"}).data.loss_mask);
  EXPECT_FALSE(resolved({"--data.shuffle=false"}).data.shuffle);
}

TEST(Flags, AWordAfterASwitchThatIsNoTruthIsTheConfig) {
  CommandLine line = parsed({"--deterministic", "llama-1b"});
  EXPECT_EQ(line.configs, Words{"llama-1b"});
  Config config = resolve(line).config;
  EXPECT_TRUE(config.train.deterministic);
  EXPECT_EQ(config.model.dim, 2048);
}

TEST(Flags, AListIsAFlagSeveralTimesAndReplacesTheFiles) {
  Config config = resolved({"llama-1b", "--data.train", "a b,c", "--data.train", "[d,e]"});
  EXPECT_EQ(config.data.train, (Words{"a b,c", "[d,e]"}));
}

TEST(Flags, TheLastOfSeveralWins) {
  EXPECT_EQ(resolved({"--optim.lr", "1", "--optim.lr", "2"}).optim.lr, 2);
}

TEST(Flags, TextStaysAsItWasTyped) {
  for (const char* word :
       {"", "'quoted'", "\"quoted\"", "[a]", "a=b", "%x", "1e5", "-x", "--not-a-flag", " ", "ä\n"})
    EXPECT_EQ(resolved({"--train.sample_prompt", word}).train.sample_prompt, word);
  Words joined = {"--train.sample_prompt=a=b"};
  EXPECT_EQ(resolved(joined).train.sample_prompt, "a=b");
}

TEST(Flags, AnUnknownOneNamesTheNearest) {
  EXPECT_TRUE(has(refused({"--optim.lrr", "1"}),
                  "there is no flag --optim.lrr. | did you mean --optim.lr?"));
  EXPECT_TRUE(has(refused({"--lr", "1"}), "did you mean --optim.lr?"));
  EXPECT_TRUE(has(refused({"--lr=1"}), "there is no flag --lr. | did you mean --optim.lr?"));
  EXPECT_TRUE(has(refused({"--model.lr", "1"}), "did you mean --optim.lr?"));
  EXPECT_TRUE(has(refused({"--learning"}), "there is no flag --learning."));
  EXPECT_TRUE(has(refused({"--step", "1"}), "did you mean --steps?"));
  EXPECT_TRUE(has(refused({"--sed", "1"}), "did you mean --seed?"));
  EXPECT_TRUE(has(refused({"--model.heads_kv", "1"}), "--model."));
  EXPECT_TRUE(has(refused({"-x"}), "there is no flag -x."));
}

TEST(Flags, AWrongValueSaysWhatIsExpected) {
  EXPECT_TRUE(has(refused({"--optim.lr", "fast"}),
                  "--optim.lr is \"fast\", but optim.lr takes a number of at least 0."));
  EXPECT_TRUE(has(refused({"--optim.lr", "-1"}), "takes a number of at least 0."));
  EXPECT_TRUE(has(refused({"--optim.lr", "nan"}), "takes a number of at least 0."));
  EXPECT_TRUE(has(refused({"--optim.lr", "inf"}), "takes a number of at least 0."));
  EXPECT_TRUE(has(refused({"--optim.lr", "1e-4x"}), "takes a number"));
  EXPECT_TRUE(has(refused({"--optim.lr", ""}), "takes a number"));
  EXPECT_TRUE(has(refused({"--model.layers", "1.5"}), "takes an integer from 1 to 100000."));
  EXPECT_TRUE(has(refused({"--model.layers", "0"}), "takes an integer from 1"));
  EXPECT_TRUE(has(refused({"--steps", "99999999999999999999"}), "takes an integer"));
  EXPECT_TRUE(has(refused({"--optim.final_ratio", "1.1"}), "takes a number from 0 to 1."));
  EXPECT_TRUE(has(refused({"--model.norm_eps", "0"}), "takes a number above 0."));
  EXPECT_TRUE(
      has(refused({"--optim.type", "adam"}), "takes one of adamw, sgd, muon. | did you mean adamw?"));
  EXPECT_TRUE(has(refused({"--shard.reshard_after_forward", "1"}), "or an integer of at least 2"));
}

TEST(Flags, MustBeUtf8BecauseTheRunKeepsThemInAFile) {
  for (const Words& flags : {Words{"--dir", "\xff"}, {"--data.train", "a", "--data.train", "\xc3"}})
    EXPECT_TRUE(has(refused(flags), " isn't valid UTF-8."));
}

TEST(Flags, AFlagIsNoValueOfTheOneBeforeIt) {
  EXPECT_TRUE(has(refused({"--dir=", "--resume"}), "--dir has no value"));
  EXPECT_TRUE(has(refused({"--dir", "--optim.lr"}), "--dir has no value"));
  EXPECT_THROW(parsed({"--optim.lr"}), CLI::ParseError);
}

// --- ready configs ---

TEST(ReadyConfigs, AreTheFilesOfTheFolder) {
  std::map<std::string, std::string> files;
  fs::path folder = paths::source("configs");
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.path().extension() != ".toml") continue;
    std::ifstream in(entry.path(), std::ios::binary);
    auto name = fs::relative(entry.path(), folder).replace_extension().string();
    files[name] = std::string(std::istreambuf_iterator<char>(in), {});
  }
  std::map<std::string, std::string> embedded;
  for (const auto& ready : ready_configs())
    embedded[std::string(ready.name)] = std::string(ready.text);
  EXPECT_EQ(embedded, files);
  for (const char* name :
       {"demo", "mlp-20480", "mlp-small", "gpt2-124m", "llama-1b", "llama-3b", "llama-8b",
        "llama-70b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b"})
    EXPECT_TRUE(embedded.contains(name)) << name;
}

TEST(ReadyConfigs, PassEveryCheckAtTheRanksTheyAreFor) {
  for (const ReadyConfig& ready : ready_configs()) {
    Config config = from_text(std::string(ready.text));
    bool two = ready.name == "bench/llama-117m" || ready.name == "bench/llama-13.8m" ||
               ready.name == "bench/mlp-2048";
    std::vector<int> worlds =
        ready.name.starts_with("bench/") ? std::vector{two ? 2 : 1} : std::vector{1, 2, 4, 8, 32};
    if (ready.name == "demo" || ready.name == "finetune") worlds = {1, 2, 4, 8, 16};
    for (int world : worlds) EXPECT_NO_THROW(check(config, world)) << ready.name << " " << world;
    EXPECT_FALSE(title(ready).empty()) << ready.name;
    EXPECT_LT(title(ready).size(), 90u) << ready.name;
  }
}

TEST(ReadyConfigs, HaveTheParametersOfThePublishedModels) {
  std::map<std::string, int64_t> published = {
      {"gpt2-124m", 124'439'808},      {"llama-1b", 1'235'814'400},
      {"llama-3b", 3'212'749'824},     {"llama-8b", 8'030'261'248},
      {"llama-70b", 70'553'706'496},   {"qwen2.5-0.5b", 494'032'768},
      {"qwen2.5-1.5b", 1'543'714'304}, {"qwen2.5-3b", 3'085'938'688},
      {"qwen2.5-7b", 7'615'616'512},   {"mlp-20480", 8LL * 20480 * 20481},
  };
  for (const auto& [name, count] : published)
    EXPECT_EQ(parameter_count(from_text(std::string(ready_config(name)->text))), count) << name;
  // Rows of the design, by their names: 182M, 953M, 3.6B, 117M, 13.8M.
  std::map<std::string, double> rows = {{"llama-182m", 182e6},
                                        {"llama-953m", 953e6},
                                        {"llama-3.6b", 3.6e9},
                                        {"llama-117m", 117e6},
                                        {"llama-13.8m", 13.8e6}};
  for (const auto& [name, count] : rows) {
    auto config = from_text(std::string(ready_config("bench/" + name)->text));
    EXPECT_NEAR(static_cast<double>(*parameter_count(config)), count, 0.006 * count) << name;
  }
}

TEST(ReadyConfigs, AreListedWithSizeAndTitle) {
  std::string list = list_ready_configs();
  EXPECT_TRUE(has(list, "llama-70b"));
  EXPECT_TRUE(has(list, "70.55B"));
  EXPECT_TRUE(has(list, "byte by byte"));
  EXPECT_TRUE(has(list, "finetune                   "));  // no parameters of its own
}

// --- layers ---

class Files : public testing::Test {
 protected:
  Files() : folder_(fs::temp_directory_path() / ("fsdp-config-" + std::to_string(getpid()))) {
    fs::create_directories(folder_);
  }
  ~Files() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& text) {
    fs::path file = folder_ / name;
    fs::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << text;
    return file.string();
  }

  fs::path folder_;
};

TEST_F(Files, FlagsWinOverTheFileAndTheFileOverDefaults) {
  auto file = write("tiny.toml", "[train]\nsteps = 10\nbatch = 4\n[optim]\nlr = 1.0\n");
  Resolved run = resolve(parsed({file, "--optim.lr", "2"}));
  EXPECT_EQ(run.name, "tiny");
  EXPECT_EQ(run.config.optim.lr, 2.0);
  EXPECT_EQ(run.config.train.batch, 4);
  EXPECT_EQ(run.config.optim.beta2, Config{}.optim.beta2);
  EXPECT_EQ(run.given, (std::set<std::string>{"train.steps", "train.batch", "optim.lr"}));
  EXPECT_TRUE(has(refused({write("bad.toml", "\n[train]\nsteps = x\n")}), "bad.toml:3:"));
}

TEST_F(Files, WithoutAConfigItIsTheDemo) {
  Resolved run = resolve(parsed({}));
  EXPECT_EQ(run.name, "demo");
  EXPECT_EQ(differences(run.config, from_text(std::string(ready_config("demo")->text))), Words{});
  EXPECT_NO_THROW(check(run.config, 2));
}

TEST_F(Files, AReadyConfigIsFoundByItsName) {
  EXPECT_EQ(resolve(parsed({"llama-8b"})).config.model.layers, 32);
  EXPECT_EQ(resolve(parsed({"bench/llama-953m"})).name, "llama-953m");
  EXPECT_TRUE(has(refused({"lama-8b"}), "did you mean llama-8b?"));
  EXPECT_TRUE(has(refused({"configs/llama-8b.toml"}), "did you mean llama-8b?"));
  EXPECT_TRUE(has(refused({"llama-1b", "llama-3b"}), "there are two configs"));
}

TEST_F(Files, AFlagThatEndsTheRunTakesBackWhatTheFileSaid) {
  Config config = resolve(parsed({"llama-1b", "--steps", "5000"})).config;
  EXPECT_EQ(config.train.tokens, 0);
  EXPECT_EQ(config.train.steps, 5000);
  EXPECT_EQ(config.optim.warmup_steps, 1000);
  config = resolve(parsed({"--epochs", "2"})).config;
  EXPECT_EQ(config.train.steps, 0);
  EXPECT_TRUE(has(refusal([&] {
                    check(resolved({"--steps", "5", "--tokens", "1e6"}), 1);
                  }),
                  "more than one of train.steps"));
}

TEST_F(Files, AShorterRunShortensTheFilesWarmUpAndSaysSo) {
  Resolved run = resolve(parsed({"llama-1b", "--steps", "20"}));
  EXPECT_EQ(run.config.optim.warmup_steps, 2);
  ASSERT_EQ(run.notes.size(), 1u);
  EXPECT_TRUE(has(run.notes[0], "optim.warmup_steps is 2 instead of 1000"));
  EXPECT_TRUE(has(refusal([] {
                    check(resolved({"--steps", "20", "--optim.warmup_steps", "30"}), 1);
                  }),
                  "more than the run's 20 steps"));
}

TEST_F(Files, AMaskNextToTokensIsUsedAndSaidSo) {
  auto tokens = write("chats/a.bin", std::string(8, 'x'));
  auto text = write("text/a.txt", "text");
  EXPECT_FALSE(resolve(parsed({"--data.train", tokens})).config.data.loss_mask);
  write("chats/a.mask", std::string(4, '\1'));
  for (const std::string& path : {tokens, (folder_ / "chats").string()}) {
    Resolved run = resolve(parsed({"--data.train", path}));
    EXPECT_TRUE(run.config.data.loss_mask) << path;
    ASSERT_EQ(run.notes.size(), 1u);
    EXPECT_TRUE(
        has(run.notes[0], "data.loss_mask is true: " + (folder_ / "chats/a.mask").string()));
  }
  Resolved without = resolve(parsed({"--data.train", tokens, "--data.loss_mask", "false"}));
  EXPECT_FALSE(without.config.data.loss_mask);
  EXPECT_TRUE(without.notes.empty());
  EXPECT_FALSE(resolve(parsed({"--data.train", text})).config.data.loss_mask);
}

TEST_F(Files, ConversationsArePackedAndThatIsSaid) {
  const auto lines = write("chats.jsonl", R"({"prompt": "a", "completion": "b"})");
  Resolved run = resolve(parsed({"--data.train", lines}));
  EXPECT_TRUE(run.config.data.packing);
  ASSERT_EQ(run.notes.size(), 2u);
  EXPECT_TRUE(has(run.notes[1], "data.packing is true: " + lines));
  for (const char* flag : {"--data.packing=false", "--data.document_mask=true"})
    EXPECT_FALSE(resolve(parsed({"--data.train", lines, flag})).config.data.packing) << flag;
  const auto pairs = write("pairs.jsonl", R"({"prompt": "a", "chosen": "b", "rejected": "c"})");
  run = resolve(parsed({"--data.train", pairs}));
  EXPECT_TRUE(run.config.data.packing && run.config.data.loss_mask);
  EXPECT_EQ(run.config.train.objective, Objective::kDpo);
  ASSERT_EQ(run.notes.size(), 3u);
  EXPECT_TRUE(has(run.notes[0], "train.objective is dpo"));
  const auto texts = write("texts.jsonl", R"({"text": "a"})");
  EXPECT_FALSE(resolve(parsed({"--data.train", texts})).config.data.packing);
}

TEST_F(Files, AResumedRunKeepsItsMaskItsPackingAndItsRate) {
  write("run/config.toml", "[data]\nloss_mask = true\npacking = true\n[optim]\nlr = 2e-5\n");
  auto file = write("mine.toml", "[train]\nsteps = 3\n");
  const std::string run = (folder_ / "run").string();
  Config again = resolve(parsed({file, "--dir", run, "--resume"})).config;
  EXPECT_TRUE(again.data.loss_mask && again.data.packing);
  Config without =
      resolve(parsed({file, "--dir", run, "--resume", "--data.loss_mask", "false"})).config;
  EXPECT_FALSE(without.data.loss_mask);
  // Nor does the recipe of --init-from change what the run was begun with.
  write("run/checkpoints/step-1/.metadata", "");
  Config tuned = resolve(parsed({file, "--init-from", "gone", "--dir", run, "--resume"})).config;
  EXPECT_EQ(tuned.optim.lr, 2e-5);
  EXPECT_EQ(tuned.data.seq, data::DataConfig().seq);
  EXPECT_EQ(tuned.train.steps, 3);
  EXPECT_EQ(tuned.train.epochs, 0);
}

TEST_F(Files, WeightsThatExistAreTunedByARecipe) {
  write("model/config.json", R"({"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 100,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "hidden_act": "silu",
    "max_position_embeddings": 500})");
  write("model/model.safetensors", "");
  const std::string model = (folder_ / "model").string();
  Resolved run = resolve(parsed({"--init-from", model}));
  EXPECT_EQ(run.name, "model");
  EXPECT_EQ(run.config.optim.lr, 2e-5);
  EXPECT_EQ(run.config.optim.warmup_share, 0.03);
  EXPECT_EQ(run.config.train.epochs, 3);
  EXPECT_EQ(run.config.train.sample_prompt, "");
  EXPECT_EQ(run.config.data.seq, 500);
  ASSERT_FALSE(run.notes.empty());
  EXPECT_TRUE(std::any_of(run.notes.begin(), run.notes.end(), [](const std::string& note) {
    return note.starts_with("recipe     learning rate 2e-5 (for all parameters), warm-up over 3 %");
  }));
  EXPECT_EQ(resolved({"--init-from", model, "--lora.rank", "4"}).optim.lr, 2e-4);

  // What was said wins, also over what the recipe says about the same in other words.
  const Config said =
      resolved({"--init-from", model, "--optim.lr", "1e-4", "--data.seq", "64", "--steps", "9",
                "--optim.warmup_steps", "2", "--train.sample_prompt", "a"});
  EXPECT_EQ(said.optim.lr, 1e-4);
  EXPECT_EQ(said.data.seq, 64);
  EXPECT_EQ(said.train.epochs, 0);
  EXPECT_EQ(said.optim.warmup_share, 0);
  EXPECT_EQ(said.train.sample_tokens, TrainConfig().sample_tokens);
  auto file = write("mine.toml", "[optim]\nlr = 0.5\n[train]\nsteps = 3\n");
  const Config mine = resolved({file, "--init-from", model});
  EXPECT_EQ(mine.optim.lr, 0.5);
  EXPECT_EQ(mine.train.epochs, 0);
  EXPECT_EQ(mine.train.micro_batch, 1);
  EXPECT_TRUE(has(refused({"finetune"}), "init_from isn't set"));
}

TEST_F(Files, ASampleHoldsTheLongestLineOfTheData) {
  const auto fitting = [&](const std::string& name, int64_t limit, const std::string& tokenizer) {
    data::DataConfig data;
    data.train = {(folder_ / name).string()};
    data.tokenizer = tokenizer;
    return fitting_seq(data, limit).seq;
  };
  std::string lines;
  for (int i = 0; i < 100; ++i) lines += std::string(i == 7 ? 1000 : 200, 'x') + "\n";
  write("chats/a.jsonl", lines);
  EXPECT_EQ(fitting("chats/a.jsonl", 0, "a.json"), 512);
  EXPECT_EQ(fitting("chats", 0, "bytes"), 1024);
  EXPECT_EQ(fitting("chats", 300, "a.json"), 300);
  write("small.jsonl", std::string(3000, 'x') + "\n");
  EXPECT_EQ(fitting("small.jsonl", 0, "a.json"), 128);  // 600 tokens or so
  write("text.txt", std::string(100'000, 'x'));
  EXPECT_EQ(fitting("text.txt", 0, "a.json"), 2048);
  EXPECT_EQ(fitting("missing", 4096, "a.json"), 2048);
}

TEST_F(Files, AResumedRunTakesItsOwnConfig) {
  Config config = resolve(parsed({"llama-1b", "--seed", "9"})).config;
  write("run/config.toml", to_toml(config));
  std::string dir = (folder_ / "run").string();
  for (const auto& spelled : {dir, dir + "/"}) {
    Resolved run = resolve(parsed({"--dir", spelled, "--resume", "--log.every", "1"}));
    EXPECT_EQ(run.name, "run");
    EXPECT_EQ(run.config.train.seed, 9);
    EXPECT_EQ(differences(run.config, config), (Words{"dir", "resume", "log.every"}));
  }
  // Without a checkpoint there is nothing to resume automatically: the run begins.
  Resolved begun = resolve(parsed({"--dir", dir, "--resume=auto"}));
  EXPECT_EQ(begun.name, "demo");
  EXPECT_FALSE(begun.config.resumes);
  EXPECT_TRUE(has(refused({"--resume"}), "needs the run's directory"));
  EXPECT_TRUE(has(refused({"--resume", "--dir", dir + "x"}), "there is no run to resume"));
}

// --- the document ---

TEST(Document, HasEveryOptionAsItIs) {
  std::ifstream in(paths::source("docs/config.md"), std::ios::binary);
  std::string document(std::istreambuf_iterator<char>(in), {});
  ASSERT_FALSE(document.empty());
  size_t begin = document.find("## Top level");
  ASSERT_NE(begin, std::string::npos);
  EXPECT_EQ(document.substr(begin), describe_options_markdown())
      << "docs/config.md: replace everything from \"## Top level\" on with this.";
}

}  // namespace
}  // namespace fsdp::train
