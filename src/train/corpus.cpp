#include "train/corpus.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <future>

#include "base/table.h"
#include "data/batches.h"
#include "data/source.h"
#include "fsdp/error.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;

// A well-mixed 64-bit number from another (the finaliser of splitmix64).
uint64_t mixed(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// --- tokens ---

// Tokens that mean nothing, for benchmarks: each a function of its place.
class RandomTokens : public data::TokenSource {
 public:
  RandomTokens(int64_t tokens, int64_t vocab, uint64_t seed)
      : tokens_(tokens), vocab_(vocab), seed_(mixed(seed)) {}

  int64_t tokens() const override { return tokens_; }
  void read(int64_t first, int64_t count, int64_t* ids) const override {
    for (int64_t i = 0; i < count; ++i)
      ids[i] = static_cast<int64_t>(mixed(seed_ + first + i) % vocab_);
  }
  std::string where(int64_t token) const override {
    return "random token " + std::to_string(token);
  }
  data::SourceInfo info() const override { return {.kind = "random"}; }

 private:
  int64_t tokens_, vocab_;
  uint64_t seed_;
};

class TokenFeed : public Feed {
 public:
  TokenFeed(std::shared_ptr<data::TokenSource> source, const data::BatchOptions& options)
      : batches_(std::move(source), options) {}

  Samples next() override {
    data::Batch batch = batches_.next();
    return {.inputs = batch.ids,
            .targets = batch.targets,
            .documents = batch.documents,
            .count = batch.ids.size(0),
            .counted = batch.tokens};
  }
  int64_t position() const override { return batches_.position(); }
  std::chrono::nanoseconds waited() const override { return batches_.waited(); }

 private:
  data::Batches batches_;
};

class TokenCorpus : public Corpus {
 public:
  TokenCorpus(const Config& config, std::shared_ptr<data::TokenSource> source,
              std::shared_ptr<data::TokenSource> valid,
              std::shared_ptr<const data::Tokenizer> tokenizer)
      : config_(config), tokenizer_(std::move(tokenizer)), info_(source->info()) {
    training_ = source;
    validation_ = std::move(valid);
    if (!validation_ && config.data.valid_share > 0)
      std::tie(training_, validation_) =
          data::split_tail(source, config.data.valid_share, config.data.seq);
    if (samples(training_) < 1)
      throw Error("data.train has " + with_separators(source->tokens()) +
                      " tokens: too few for one sample of " + std::to_string(config.data.seq) +
                      " and some for validation.",
                  "give more text, a smaller --data.seq, or --data.valid-share 0.");
  }

  std::unique_ptr<Feed> training(const World& world, int64_t position) const override {
    data::BatchOptions options = batch_options(world);
    options.shuffle = config_.data.shuffle;
    options.prefetch = config_.data.prefetch;
    options.position = position;
    return std::make_unique<TokenFeed>(training_, options);
  }

  std::unique_ptr<Feed> validation(const World& world) const override {
    if (validation_batches() == 0) return nullptr;
    data::BatchOptions options = batch_options(world);
    options.shuffle = false;
    options.prefetch = std::min<int64_t>(config_.data.prefetch, 1);
    options.repeat = false;
    return std::make_unique<TokenFeed>(validation_, options);
  }

  int64_t validation_batches() const override {
    return (samples(validation_) + config_.train.batch - 1) / config_.train.batch;
  }
  int64_t samples_per_epoch() const override { return samples(training_); }
  std::shared_ptr<const data::Tokenizer> tokenizer() const override { return tokenizer_; }
  int64_t vocab() const override { return tokenizer_ ? tokenizer_->vocab_size() : 0; }

  std::string title() const override {
    int64_t tokens = training_->tokens() + (validation_ ? validation_->tokens() : 0);
    std::string amount = with_separators(tokens) + " tokens";
    if (info_.kind == "random") return "random tokens";
    return with_separators(info_.files) + (info_.files == 1 ? " file (" : " files (") + info_.kind +
           "), " + human_bytes(static_cast<double>(info_.bytes)) + ", " + amount;
  }

 private:
  int64_t samples(const std::shared_ptr<data::TokenSource>& source) const {
    return source ? std::max<int64_t>(source->tokens() - 1, 0) / config_.data.seq : 0;
  }

  data::BatchOptions batch_options(const World& world) const {
    return {.seq = config_.data.seq,
            .batch = config_.train.batch,
            .rank = world.rank(),
            .world = world.size(),
            .seed = static_cast<uint64_t>(config_.train.seed),
            .document_mask = config_.data.document_mask,
            .eos = tokenizer_ ? tokenizer_->eos() : std::nullopt,
            .vocab = config_.model.vocab > 0 ? config_.model.vocab : vocab()};
  }

  Config config_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  data::SourceInfo info_;
  std::shared_ptr<data::TokenSource> training_, validation_;
};

// --- vectors, for the MLP: what it learns is to move every element one place on ---

constexpr int64_t kVectorsPerEpoch = 65536, kValidationVectors = 1024;

class VectorFeed : public Feed {
 public:
  VectorFeed(int64_t width, int64_t batch, int64_t seed, const World& world, int64_t position)
      : width_(width), batch_(batch), seed_(seed), world_(world), position_(position) {
    ahead_ = std::async(std::launch::async, [this, position] { return made(position); });
  }

  Samples next() override {
    auto start = std::chrono::steady_clock::now();
    Samples samples = ahead_.get();
    waited_ += std::chrono::steady_clock::now() - start;
    position_ += batch_;
    ahead_ = std::async(std::launch::async, [this, at = position_] { return made(at); });
    return samples;
  }
  int64_t position() const override { return position_; }
  std::chrono::nanoseconds waited() const override { return waited_; }

 private:
  Samples made(int64_t position) const {
    int64_t rows = batch_ / world_.size(), first = position + world_.rank() * rows;
    at::Tensor x = at::empty({rows, width_}, at::kFloat);
    for (int64_t row = 0; row < rows; ++row) {
      at::Generator random = at::detail::createCPUGenerator(mixed(mixed(seed_) + first + row));
      at::Tensor out = x.select(0, row);
      at::randn_out(out, {width_}, random);
    }
    return {.inputs = x, .targets = x.roll(1, 1), .count = rows, .counted = x.numel()};
  }

  int64_t width_, batch_, seed_;
  World world_;
  int64_t position_;
  std::chrono::nanoseconds waited_{0};
  std::future<Samples> ahead_;  // the next batch; last, so that it is done before the rest goes
};

class VectorCorpus : public Corpus {
 public:
  explicit VectorCorpus(const Config& config) : config_(config) {}

  std::unique_ptr<Feed> training(const World& world, int64_t position) const override {
    return std::make_unique<VectorFeed>(config_.model.width, config_.train.batch,
                                        config_.train.seed, world, position);
  }
  std::unique_ptr<Feed> validation(const World& world) const override {
    return std::make_unique<VectorFeed>(config_.model.width, config_.train.batch,
                                        ~config_.train.seed, world, 0);
  }
  int64_t validation_batches() const override {
    return std::max<int64_t>(1, kValidationVectors / config_.train.batch);
  }
  int64_t samples_per_epoch() const override { return kVectorsPerEpoch; }
  std::string title() const override { return "random vectors, to be moved by one place"; }

 private:
  Config config_;
};

bool is_random(const std::vector<std::string>& paths) {
  return paths.size() == 1 && paths.front() == "random";
}

constexpr int64_t kRandomTokens = int64_t{1} << 32;

}  // namespace

std::vector<std::string> libtorch_headers() {
  Dl_info library{};
  // A function of LibTorch tells where its library lies.
  if (dladdr(reinterpret_cast<void*>(&at::globalContext), &library) && library.dli_fname) {
    fs::path include =
        fs::weakly_canonical(fs::path(library.dli_fname).parent_path() / "../include");
    std::error_code problem;
    if (fs::is_directory(include / "c10", problem) && fs::is_directory(include / "torch", problem))
      return {(include / "c10").string(), (include / "torch").string()};
  }
  throw Error("LibTorch's headers are not beside its libraries, so there is no text to train on.",
              "name some: --data.train FILE_OR_FOLDER");
}

void check_paths(const Config& config) {
  std::error_code ignored;
  if (!config.offload.directory.empty() && !fs::is_directory(config.offload.directory, ignored))
    throw Error("offload.directory: there is no folder " + config.offload.directory + ".",
                "make one, on a disk with room for masters and states.");
  if (config.model.type == "mlp") return;
  auto check = [](const std::string& key, const std::string& path, const std::string& hint) {
    std::error_code problem;
    if (path != "random" && !fs::exists(path, problem))
      throw Error(key + ": there is no " + path + ".", hint);
  };
  for (const std::string& path : config.data.train)
    check("data.train", path,
          "fsdp tokenize TEXT... --out FILE makes a token file; --data.train names yours, and "
          "\"random\" tries a model without data.");
  for (const std::string& path : config.data.valid)
    check("data.valid", path, "leave it out to hold back a part of data.train.");
  if (config.data.tokenizer != "bytes")
    check("data.tokenizer", config.data.tokenizer, "give a tokenizer.json, or bytes.");
}

std::unique_ptr<Corpus> open_corpus(const Config& config, const std::string& cache) {
  if (config.model.type == "mlp") return std::make_unique<VectorCorpus>(config);
  if (is_random(config.data.train)) {
    if (config.model.vocab < 1)
      throw Error("random tokens need a vocabulary.", "give --model.vocab.");
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
      .cache_dir = cache};
  std::shared_ptr<data::TokenSource> source = data::open_source(options), valid;
  if (!config.data.valid.empty()) {
    options.paths = config.data.valid;
    valid = data::open_source(options);
  }
  // Token files do not say how they were made: their tokenizer is known only if one was named.
  bool text = source->info().kind.starts_with("text") || source->info().kind == "mixed";
  bool known = text || config.data.tokenizer != "bytes";
  return std::make_unique<TokenCorpus>(config, source, valid, known ? options.tokenizer : nullptr);
}

}  // namespace fsdp::train
