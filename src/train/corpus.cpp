#include "train/corpus.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <future>

#include "base/format.h"
#include "base/table.h"
#include "data/batches.h"
#include "data/order.h"
#include "data/source.h"
#include "fsdp/error.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;

// One step of splitmix64.
uint64_t random_number(uint64_t state) {
  return data::mixed(state + 0x9E3779B97F4A7C15ull);
}

// --- tokens ---

// Random tokens, for benchmarks: each is a function of its position.
class RandomTokens : public data::TokenSource {
 public:
  RandomTokens(int64_t tokens, int64_t vocab, uint64_t seed)
      : tokens_(tokens), vocab_(vocab), seed_(random_number(seed)) {}

  int64_t tokens() const override { return tokens_; }
  void read(int64_t first, int64_t count, int64_t* ids) const override {
    for (int64_t i = 0; i < count; ++i)
      ids[i] = static_cast<int64_t>(random_number(seed_ + first + i) % vocab_);
  }
  std::string where(int64_t token) const override { return formatted("random token {}", token); }
  data::SourceInfo info() const override { return {.kind = "random"}; }

 private:
  int64_t tokens_, vocab_;
  uint64_t seed_;
};

class TokenFeed : public Feed {
 public:
  TokenFeed(std::shared_ptr<data::TokenSource> source, const data::BatchOptions& options,
            Context context)
      : batches_(std::move(source), options), context_(std::move(context)) {}

  Samples next() override {
    data::Batch batch = batches_.next();
    Samples samples{.inputs = context_.part(batch.ids),
                    .targets = context_.part(batch.targets),
                    .documents = batch.documents,
                    .room = batch.room,
                    .count = batch.ids.size(0),
                    .counted = batch.tokens};
    if (context_) samples.counted = samples.targets.ne(-100).sum().item<int64_t>();
    return samples;
  }
  int64_t position() const override { return batches_.position(); }
  std::chrono::nanoseconds waited() const override { return batches_.waited(); }

 private:
  data::Batches batches_;
  Context context_;
};

class TokenCorpus : public Corpus {
 public:
  TokenCorpus(const Config& config, std::shared_ptr<data::TokenSource> source,
              std::shared_ptr<data::TokenSource> valid,
              std::shared_ptr<const data::Tokenizer> tokenizer)
      : config_(config),
        tokenizer_(std::move(tokenizer)),
        training_(std::move(source)),
        validation_(std::move(valid)) {
    splits_ = !validation_ && config.data.valid_share > 0;
    if (config.data.packing) {
      packed_ = std::make_shared<data::Packing>(*training_, config.data.seq);
      if (validation_)
        packed_validation_ = std::make_shared<data::Packing>(*validation_, config.data.seq);
    }
    int64_t samples = samples_of(*training_, packed_.get());
    if (samples < (splits_ ? 2 : 1))
      throw Error(formatted("data.train has {} tokens, too few for a sample of {}{}.",
                            with_separators(training_->tokens()), config.data.seq,
                            splits_ ? " and one for validation" : ""),
                  "use more text, a smaller --data.seq, or --data.valid_share 0.");
    if (splits_) {
      split_ = data::split_samples(samples, config.data.valid_share);
      validation_ = training_;
      packed_validation_ = packed_;
    } else {
      split_ = {
          data::SampleSet(samples),
          data::SampleSet(validation_ ? samples_of(*validation_, packed_validation_.get()) : 0)};
    }
  }

  std::unique_ptr<Feed> training(const Share& share, int64_t position) const override {
    data::BatchOptions options = batch_options(share);
    options.shuffle = config_.data.shuffle;
    options.seed = static_cast<uint64_t>(config_.train.seed);
    options.prefetch = config_.data.prefetch;
    options.position = position;
    options.packing = packed_;
    options.samples = split_.training;
    return std::make_unique<TokenFeed>(training_, options, share.context);
  }

  // Shuffled, so that the first few batches represent all of the data, and in the same order
  // whatever train.seed is, so that evaluations of different runs can be compared.
  std::unique_ptr<Feed> validation(const Share& share) const override {
    if (validation_batches() == 0) return nullptr;
    data::BatchOptions options = batch_options(share);
    options.seed = kValidationSeed;
    options.prefetch = std::min<int64_t>(config_.data.prefetch, 1);
    options.repeat = false;
    options.packing = packed_validation_;
    options.samples = split_.validation;
    return std::make_unique<TokenFeed>(validation_, options, share.context);
  }

  int64_t validation_batches() const override {
    return (split_.validation.size() + config_.train.batch - 1) / config_.train.batch;
  }
  int64_t samples_per_epoch() const override { return split_.training.size(); }
  std::string split_rule() const override { return splits_ ? data::kSplitRule : ""; }
  std::shared_ptr<const data::Tokenizer> tokenizer() const override { return tokenizer_; }
  int64_t vocab() const override { return tokenizer_ ? tokenizer_->vocab_size() : 0; }

  std::string title() const override {
    data::SourceInfo info = training_->info();
    if (info.kind == "random") return "random tokens";
    int64_t tokens = training_->tokens() + (validation_ && !splits_ ? validation_->tokens() : 0);
    std::string text = formatted(
        "{} file{} ({}), {}, {} tokens", with_separators(info.files), info.files == 1 ? "" : "s",
        info.kind, human_bytes(static_cast<double>(info.bytes)), with_separators(tokens));
    if (packed_) text += formatted("\npacked     {}", packed_->summary());
    return text;
  }
  std::optional<Packed> packed() const override {
    if (!packed_) return std::nullopt;
    return Packed{.padding = packed_->padding(),
                  .usual_length = packed_->usual_length(),
                  .pairs = packed_->pairs()};
  }

 private:
  static constexpr uint64_t kValidationSeed = 1;

  int64_t samples_of(const data::TokenSource& source, const data::Packing* packing) const {
    if (packing) return packing->samples();
    return std::max<int64_t>(source.tokens() - 1, 0) / config_.data.seq;
  }

  data::BatchOptions batch_options(const Share& share) const {
    return {.seq = config_.data.seq,
            .batch = config_.train.batch,
            .rank = share.rank,
            .world = share.ranks,
            .document_mask = config_.data.document_mask,
            .eos = tokenizer_ ? tokenizer_->eos() : std::nullopt,
            .vocab = config_.model.vocab > 0 ? config_.model.vocab : vocab()};
  }

  Config config_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  std::shared_ptr<data::TokenSource> training_, validation_;  // the same if splits_
  std::shared_ptr<const data::Packing> packed_, packed_validation_;  // likewise; null: not packed
  bool splits_ = false;  // validation samples are held out of data.train
  data::Split split_;
};

// --- vectors, for the MLP, which learns to rotate them by one element ---

constexpr int64_t kVectorsPerEpoch = 65536, kValidationVectors = 1024;

class VectorFeed : public Feed {
 public:
  VectorFeed(int64_t width, int64_t batch, int64_t seed, const Share& share, int64_t position)
      : width_(width), batch_(batch), seed_(seed), share_(share), position_(position) {
    ahead_ = std::async(std::launch::async, [this, position] { return made(position); });
  }

  Samples next() override {
    auto start = std::chrono::steady_clock::now();
    Samples samples = ahead_.get();  // Ends: the loader has read a batch, or failed
    waited_ += std::chrono::steady_clock::now() - start;
    position_ += batch_;
    ahead_ = std::async(std::launch::async, [this, at = position_] { return made(at); });
    return samples;
  }
  int64_t position() const override { return position_; }
  std::chrono::nanoseconds waited() const override { return waited_; }

 private:
  Samples made(int64_t position) const {
    int64_t rows = batch_ / share_.ranks, first = position + share_.rank * rows;
    at::Tensor x = at::empty({rows, width_}, at::kFloat);
    for (int64_t row = 0; row < rows; ++row) {
      at::Generator random =
          at::detail::createCPUGenerator(random_number(random_number(seed_) + first + row));
      at::Tensor out = x.select(0, row);
      at::randn_out(out, {width_}, random);
    }
    return {.inputs = x, .targets = x.roll(1, 1), .count = rows, .counted = x.numel()};
  }

  int64_t width_, batch_, seed_;
  Share share_;
  int64_t position_;
  std::chrono::nanoseconds waited_{0};
  std::future<Samples> ahead_;  // the next batch; destroyed first, because its task reads the rest
};

class VectorCorpus : public Corpus {
 public:
  explicit VectorCorpus(const Config& config) : config_(config) {}

  std::unique_ptr<Feed> training(const Share& share, int64_t position) const override {
    return std::make_unique<VectorFeed>(config_.model.width, config_.train.batch,
                                        config_.train.seed, share, position);
  }
  std::unique_ptr<Feed> validation(const Share& share) const override {
    return std::make_unique<VectorFeed>(config_.model.width, config_.train.batch,
                                        ~config_.train.seed, share, 0);
  }
  int64_t validation_batches() const override {
    return std::max<int64_t>(1, kValidationVectors / config_.train.batch);
  }
  int64_t samples_per_epoch() const override { return kVectorsPerEpoch; }
  std::string title() const override { return "random vectors, to be rotated by one element"; }

 private:
  Config config_;
};

bool is_random_data(const std::vector<std::string>& paths) {
  return paths.size() == 1 && paths.front() == "random";
}

constexpr int64_t kRandomTokens = int64_t{1} << 32;

}  // namespace

std::vector<std::string> libtorch_headers() {
  Dl_info library{};
  // The path of the library that a LibTorch function is in.
  if (dladdr(reinterpret_cast<void*>(&at::globalContext), &library) && library.dli_fname) {
    fs::path include =
        fs::weakly_canonical(fs::path(library.dli_fname).parent_path() / "../include");
    std::error_code problem;
    if (fs::is_directory(include / "c10", problem) && fs::is_directory(include / "torch", problem))
      return {(include / "c10").string(), (include / "torch").string()};
  }
  throw Error("LibTorch's headers aren't next to its libraries, so there is no text to train on.",
              "pass some: --data.train FILE_OR_FOLDER.");
}

void check_paths(const Config& config) {
  std::error_code ignored;
  if (!config.offload.directory.empty() && !fs::is_directory(config.offload.directory, ignored))
    throw Error(formatted("offload.directory: there is no directory {}.", config.offload.directory),
                "create it on a disk with room for masters and optimizer states.");
  if (config.model.type == models::ModelType::kMlp) return;
  auto check = [](const std::string& key, const std::string& path, const std::string& hint) {
    std::error_code problem;
    if (path != "random" && !fs::exists(path, problem))
      throw Error(formatted("{}: there is no {}.", key, path), hint);
  };
  for (const std::string& path : config.data.train)
    check("data.train", path,
          "pass your data with --data.train. fsdp tokenize TEXT... --out FILE makes a token file; "
          "\"random\" tries a model without data.");
  for (const std::string& path : config.data.valid)
    check("data.valid", path, "leave it out to hold out a share of data.train.");
  if (config.data.tokenizer != "bytes")
    check("data.tokenizer", config.data.tokenizer, "pass a tokenizer.json, or bytes.");
  if (!config.data.chat_template.empty())
    check("data.chat_template", config.data.chat_template, "pass a chat template, a .jinja file.");
}

std::unique_ptr<Corpus> open_corpus(const Config& config, const std::string& cache) {
  if (config.model.type == models::ModelType::kMlp) return std::make_unique<VectorCorpus>(config);
  if (is_random_data(config.data.train)) {
    if (config.model.vocab < 1)
      throw Error("random tokens need a vocabulary size.", "pass --model.vocab.");
    auto random = [&](int64_t tokens, int64_t seed) {
      return std::make_shared<RandomTokens>(tokens, config.model.vocab, seed);
    };
    int64_t valid = 256 * config.data.seq + 1;
    return std::make_unique<TokenCorpus>(config, random(kRandomTokens, config.train.seed),
                                         random(valid, ~config.train.seed), nullptr);
  }
  data::SourceOptions options{
      .paths = config.data.train.empty() ? libtorch_headers() : config.data.train,
      .format = config.data.format,
      .tokenizer = data::Tokenizer::load(config.data.tokenizer),
      .loss_mask = config.data.loss_mask,
      .lines = config.data.lines(),
      .cache_dir = cache};
  std::shared_ptr<data::TokenSource> source = data::open_source(options), valid;
  if (!config.data.valid.empty()) {
    options.paths = config.data.valid;
    valid = data::open_source(options);
  }
  // Token files don't record their tokenizer: it is known only if the config names one.
  const std::string kind = source->info().kind;
  bool text = kind.starts_with("text") || kind.ends_with("JSON lines") || kind == "mixed";
  bool known = text || config.data.tokenizer != "bytes";
  return std::make_unique<TokenCorpus>(config, source, valid, known ? options.tokenizer : nullptr);
}

}  // namespace fsdp::train
