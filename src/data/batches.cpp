// One thread loads, one consumes. The loader keeps up to `prefetch` batches ready. It stops at the
// first failure, which stays in the queue until next() reaches it.
#include "data/batches.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <thread>
#include <vector>

#include "base/format.h"
#include "base/mutex.h"
#include "base/table.h"
#include "data/order.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

constexpr int64_t kIgnored = -100;  // cross_entropy's default ignore_index

void check_batches(const TokenSource& source, const BatchOptions& options) {
  if (options.seq < 1 || options.batch < 1) {
    throw Error(formatted("a batch can't have {} samples of {} tokens.",
                          with_separators(options.batch), with_separators(options.seq)),
                "both must be at least 1.");
  }
  if (options.world < 1 || options.rank < 0 || options.rank >= options.world) {
    throw Error(formatted("rank {} isn't in a world of {}.", with_separators(options.rank),
                          with_separators(options.world)),
                "ranks count from 0 to world - 1.");
  }
  if (options.batch % options.world) {
    throw Error(formatted("a batch of {} samples can't be divided among {} ranks.",
                          with_separators(options.batch), with_separators(options.world)),
                "choose a batch that is a multiple of the number of ranks.");
  }
  if (options.position < 0 || options.prefetch < 0) {
    throw Error("the position and prefetch of batches can't be negative.", "pass 0 or more.");
  }
  if (!options.packing && source.tokens() < options.seq + 1) {
    throw Error(formatted("the data has {} tokens, but a sample needs {}.",
                          with_separators(source.tokens()), with_separators(options.seq + 1)),
                "use more data, or shorter samples.");
  }
  if (options.samples && options.samples->size() == 0)
    throw Error("no samples were selected.", "pass a SampleSet with at least one sample.");
}

}  // namespace

struct Batches::State {
  std::shared_ptr<TokenSource> source;
  BatchOptions options;
  int64_t samples = 0;   // in an epoch
  int64_t position = 0;  // of next()
  std::chrono::nanoseconds waited{0};

  struct Loaded {
    Batch batch;
    std::exception_ptr failure;
  };
  Mutex mutex;
  Condition changed;
  std::deque<Loaded> ready FSDP_GUARDED_BY(mutex);
  bool stopping FSDP_GUARDED_BY(mutex) = false;
  std::thread loader;

  // The number, in the source, of the sample at a place of the stream.
  int64_t sample(int64_t place) const {
    int64_t epoch = place / samples, i = place % samples;
    if (options.shuffle) i = shuffled(i, samples, options.seed, epoch);
    return options.samples ? (*options.samples)[i] : i;
  }

  Batch load(int64_t first) const;
  void load_row(int64_t sample, Batch& batch, int64_t row, std::vector<int64_t>& ids,
                std::vector<uint8_t>& counts) const;
  void load_packed(int64_t sample, Batch& batch, int64_t row, std::vector<int64_t>& ids,
                   std::vector<uint8_t>& counts) const;
  void read(int64_t first, int64_t count, int64_t* ids) const;  // with their check
  void number_documents(int64_t first, const int64_t* ids, int64_t* documents) const;
  int64_t room_for(const Batch& batch) const;
  void run();
};

Batch Batches::State::load(int64_t first) const {
  int64_t rows = options.batch / options.world, seq = options.seq;
  Batch batch;
  batch.ids = at::zeros({rows, seq}, at::kLong);
  batch.targets = at::full({rows, seq}, kIgnored, at::kLong);
  if (options.document_mask || options.packing) batch.documents = at::zeros({rows, seq}, at::kLong);
  batch.all_samples =
      options.repeat ? options.batch : std::clamp<int64_t>(samples - first, 0, options.batch);
  // An incomplete last batch is divided among the ranks as evenly as possible.
  int64_t from = batch.all_samples * options.rank / options.world;
  int64_t to = batch.all_samples * (options.rank + 1) / options.world;
  batch.samples = to - from;
  std::vector<int64_t> ids(seq + 1);
  std::vector<uint8_t> counts(seq + 1);
  for (int64_t row = 0; row < batch.samples; ++row) {
    const int64_t number = sample(first + from + row);
    if (options.packing)
      load_packed(number, batch, row, ids, counts);
    else
      load_row(number, batch, row, ids, counts);
  }
  if (batch.documents.defined()) batch.room = room_for(batch);
  return batch;
}

void Batches::State::read(int64_t first, int64_t count, int64_t* ids) const {
  source->read(first, count, ids);
  for (int64_t i = 0; options.vocab > 0 && i < count; ++i) {
    if (ids[i] >= 0 && ids[i] < options.vocab) continue;
    throw Error(
        formatted("{} has id {}, but the vocabulary has {} tokens.", source->where(first + i),
                  with_separators(ids[i]), with_separators(options.vocab)),
        "was the file made with another tokenizer, or is it in another format (data.format)?");
  }
}

void Batches::State::load_row(int64_t number, Batch& batch, int64_t row, std::vector<int64_t>& ids,
                              std::vector<uint8_t>& counts) const {
  int64_t seq = options.seq, first = number * seq;
  read(first, seq + 1, ids.data());
  std::copy_n(ids.begin(), seq, batch.ids.mutable_data_ptr<int64_t>() + row * seq);
  source->read_mask(first, seq + 1, counts.data());
  int64_t* targets = batch.targets.mutable_data_ptr<int64_t>() + row * seq;
  for (int64_t i = 0; i < seq; ++i) {
    if (!counts[i + 1]) continue;
    targets[i] = ids[i + 1];
    ++batch.tokens;
  }
  if (options.document_mask) {
    number_documents(first, ids.data(), batch.documents.mutable_data_ptr<int64_t>() + row * seq);
  }
}

// Whole documents, one after another. The padding behind them is a document of its own.
void Batches::State::load_packed(int64_t number, Batch& batch, int64_t row,
                                 std::vector<int64_t>& ids, std::vector<uint8_t>& counts) const {
  const int64_t seq = options.seq;
  int64_t* inputs = batch.ids.mutable_data_ptr<int64_t>() + row * seq;
  int64_t* targets = batch.targets.mutable_data_ptr<int64_t>() + row * seq;
  int64_t* documents = batch.documents.mutable_data_ptr<int64_t>() + row * seq;
  const bool pairs = options.packing->pairs();
  int64_t at = 0, place = 0, before = 0;  // targets of the document before
  for (const PackedDocument& document : options.packing->documents(number)) {
    int64_t learned = 0;
    read(document.first, document.tokens, ids.data());
    source->read_mask(document.first, document.tokens, counts.data());
    for (int64_t i = 0; i + 1 < document.tokens; ++i, ++at) {
      inputs[at] = ids[i];
      documents[at] = place;
      if (!counts[i + 1]) continue;
      targets[at] = ids[i + 1];
      ++learned;
    }
    if (!pairs) batch.tokens += learned;
    if (pairs && place % 2 == 1 && before > 0 && learned > 0) ++batch.tokens;
    before = learned;
    ++place;
  }
  std::fill(documents + at, documents + seq, place);
}

// A packing knows. Otherwise there is room for documents of 128 tokens, or of half as many until
// all fit: recorded steps need the same shapes, and room costs the GPU memory.
int64_t Batches::State::room_for(const Batch& batch) const {
  if (options.packing) return options.packing->most();
  const int64_t most = batch.documents.select(1, options.seq - 1).max().item<int64_t>() + 1;
  int64_t room = std::max<int64_t>(8, options.seq / 128);
  while (room < most) room *= 2;
  return std::min(room, options.seq);
}

void Batches::State::number_documents(int64_t first, const int64_t* ids, int64_t* documents) const {
  auto starts = source->document_starts(first, options.seq);
  auto start = starts.begin();
  int64_t number = 0;
  for (int64_t i = 0; i < options.seq; ++i) {
    bool by_token =
        i > 0 && options.eos && ids[i - 1] == *options.eos && source->ends_document(first + i - 1);
    bool by_index = start != starts.end() && *start == first + i;
    if (by_index) ++start;
    if (i > 0 && (by_token || by_index)) ++number;
    documents[i] = number;
  }
}

void Batches::State::run() {
  for (int64_t at = position;; at += options.batch) {
    Loaded loaded;
    try {
      loaded.batch = load(at);
    } catch (...) {
      loaded.failure = std::current_exception();
    }
    bool last = loaded.failure || loaded.batch.all_samples == 0;
    Lock lock(mutex);
    // Ends: a batch is taken, or the loader is stopped.
    changed.wait(lock, [&]() FSDP_REQUIRES(mutex) {
      return stopping || static_cast<int64_t>(ready.size()) < options.prefetch;
    });
    if (stopping) return;
    ready.push_back(std::move(loaded));
    changed.notify_all();
    if (last) return;
  }
}

Batches::Batches(std::shared_ptr<TokenSource> source, BatchOptions options)
    : state_(std::make_unique<State>()) {
  check_batches(*source, options);
  const int64_t all =
      options.packing ? options.packing->samples() : (source->tokens() - 1) / options.seq;
  state_->samples = options.samples ? options.samples->size() : all;
  state_->source = std::move(source);
  state_->position = options.position;
  state_->options = options;
  if (options.prefetch > 0) state_->loader = std::thread([state = state_.get()] { state->run(); });
}

Batches::~Batches() {
  {
    Lock lock(state_->mutex);
    state_->stopping = true;
  }
  state_->changed.notify_all();
  if (state_->loader.joinable()) state_->loader.join();  // Ends: with the batch it loads
}

Batch Batches::next() {
  State& state = *state_;
  auto begin = std::chrono::steady_clock::now();
  Batch batch;
  if (state.options.prefetch == 0) {
    batch = state.load(state.position);
  } else {
    Lock lock(state.mutex);
    // Ends: the loader has read a batch, or failed.
    state.changed.wait(lock, [&]() FSDP_REQUIRES(state.mutex) { return !state.ready.empty(); });
    State::Loaded& front = state.ready.front();
    // A failure or the end stays in the queue: the loader has exited, and next() may be called
    // again.
    if (front.failure) std::rethrow_exception(front.failure);
    batch = front.batch;
    if (batch.all_samples > 0) {
      state.ready.pop_front();
      state.changed.notify_all();
    }
  }
  state.position += batch.all_samples;
  state.waited += std::chrono::steady_clock::now() - begin;
  return batch;
}

int64_t Batches::position() const {
  return state_->position;
}
int64_t Batches::samples_per_epoch() const {
  return state_->samples;
}
std::chrono::nanoseconds Batches::waited() const {
  return state_->waited;
}

}  // namespace fsdp::data
