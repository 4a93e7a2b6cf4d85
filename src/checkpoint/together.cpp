#include "checkpoint/together.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>

#include "base/format.h"
#include "checkpoint/messages.h"
#include "comm/store.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

std::vector<int64_t> all_numbers(const World& world, const std::string& label, int64_t mine) {
  const auto sent = at::tensor({mine}, at::TensorOptions(at::kLong)).to(world.device());
  at::Tensor all = at::empty({world.size()}, sent.options());
  world.comm().all_gather(all, sent, {.label = label});
  all = all.cpu();
  const auto* numbers = all.const_data_ptr<int64_t>();
  return {numbers, numbers + world.size()};
}

// Gathers a text from each rank: first the lengths, then everything padded to the longest.
std::vector<std::string> all_texts(const World& world, const std::string& label,
                                   const std::string& mine) {
  if (world.size() == 1) return {mine};
  const auto lengths = all_numbers(world, label, static_cast<int64_t>(mine.size()));
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<std::string> texts(lengths.size());
  if (longest == 0) return texts;
  at::Tensor sent = at::zeros({longest}, at::TensorOptions(at::kByte));
  std::memcpy(sent.data_ptr(), mine.data(), mine.size());
  sent = sent.to(world.device());
  at::Tensor all = at::empty({world.size() * longest}, sent.options());
  world.comm().all_gather(all, sent, {.label = label});
  all = all.cpu();
  const auto* bytes = static_cast<const char*>(all.const_data_ptr());
  for (size_t r = 0; r < texts.size(); ++r)
    texts[r].assign(bytes + static_cast<int64_t>(r) * longest, static_cast<size_t>(lengths[r]));
  return texts;
}

// Runs an action. What it throws is also kept in `thrown`, to be rethrown on this rank as it was.
Outcome outcome_of(const std::function<std::string()>& act, std::exception_ptr& thrown) {
  try {
    return {act()};
  } catch (const Error& error) {
    thrown = std::current_exception();
    return {"", error};
  } catch (const std::exception& error) {
    thrown = std::current_exception();
    return {"", Error(error.what(), "")};
  }
}

Error named(int rank, const Error& failure) {
  return {formatted("rank {}: {}", rank, failure.message()), failure.hint()};
}

std::vector<Outcome> decode_all(const std::vector<std::string>& texts, const std::string& label) {
  std::vector<Outcome> outcomes;
  for (const auto& text : texts)
    outcomes.push_back(Outcome::decode(text, formatted("{}: rank {}", label, outcomes.size())));
  return outcomes;
}

// The failure of the first rank that failed.
std::optional<Error> first_failure(const std::vector<Outcome>& outcomes) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank)
    if (outcomes[rank].failure) return named(static_cast<int>(rank), *outcomes[rank].failure);
  return std::nullopt;
}

// --- texts in the store, in pieces because the size of a value is limited ---

constexpr size_t kTextPiece = 4 << 20;

class StoredTexts {
 public:
  StoredTexts(World world, std::string name)
      : world_(std::move(world)), store_(world_.store()->clone()), name_(std::move(name)) {}

  void post(const std::string& key, const std::string& text) const {
    const size_t pieces = text.size() / kTextPiece + 1;
    for (size_t i = 1; i < pieces; ++i)
      store_->set(path(key, i), text.substr(i * kTextPiece, kTextPiece));
    // The first piece comes last: a reader that sees it finds all of them.
    store_->set(path(key, 0), FirstPiece{pieces, text.substr(0, kTextPiece)}.encode());
  }

  std::string take(const std::string& key, int rank, const std::string& label) const {
    const std::string what = formatted("{}: waiting for rank {}", label, rank);
    const auto limit = 12 * world_.timeout();
    if (!comm::await_keys(store_, {path(key, 0)}, limit, what, [this] { return world_.trouble(); }))
      throw Error(formatted("{}: no answer in {} s.", what, limit.count() / 1000),
                  "check that the process is running and how fast it can write; FSDP_TIMEOUT "
                  "(seconds) allows more time.");
    auto [pieces, text] =
        FirstPiece::decode(store_->get_to_str(path(key, 0)),
                           formatted("{}: rank {} (store key {})", label, rank, path(key, 0)));
    for (size_t i = 1; i < pieces; ++i) text += store_->get_to_str(path(key, i));
    for (size_t i = 0; rank != 0 && i < pieces; ++i) store_->deleteKey(path(key, i));
    return text;
  }

 private:
  std::string path(const std::string& key, size_t piece) const {
    return formatted("fsdp/exchange/{}/{}/{}", name_, key, piece);
  }

  World world_;
  comm::Store store_;
  std::string name_;
};

std::string key_to_first(int rank) {
  return formatted("to/{}", rank);
}
constexpr const char* kFromFirst = "from";

}  // namespace

void together(const World& world, const std::string& label, const std::function<void()>& act) {
  std::exception_ptr thrown;
  const auto acted = [&] {
    act();
    return std::string();
  };
  const auto texts = all_texts(world, label, outcome_of(acted, thrown).encode());
  if (thrown) std::rethrow_exception(thrown);
  if (const auto failure = first_failure(decode_all(texts, label))) throw *failure;
}

int64_t largest_number(const World& world, const std::string& label, int64_t mine) {
  if (world.size() == 1) return mine;
  const auto all = all_numbers(world, label, mine);
  return *std::max_element(all.begin(), all.end());
}

Exchange by_collectives(const World& world) {
  const auto all = [world](const std::string& label, const std::string& mine) {
    return all_texts(world, label, mine);
  };
  return {all, [all](const std::string& label, const std::string& mine) {
            return all(label, mine).front();
          }};
}

Exchange by_store(const World& world, const std::string& name) {
  if (!world.store()) return by_collectives(world);  // a fake world has no other ranks
  const auto texts = std::make_shared<StoredTexts>(world, name);
  const int rank = world.rank(), size = world.size();
  return {[texts, rank, size](const std::string& label, const std::string& mine) {
            std::vector<std::string> all{mine};
            if (rank != 0) texts->post(key_to_first(rank), mine);
            for (int r = 1; rank == 0 && r < size; ++r)
              all.push_back(texts->take(key_to_first(r), r, label));
            return all;
          },
          [texts, rank, size](const std::string& label, const std::string& mine) {
            if (rank != 0) return texts->take(kFromFirst, 0, label);
            if (size > 1) texts->post(kFromFirst, mine);
            return mine;
          }};
}

void commit(const World& world, const Exchange& exchange, const std::string& label,
            const std::function<std::string()>& act,
            const std::function<void(const std::vector<std::string>&)>& finish) {
  std::exception_ptr thrown, lost, unheard;
  const Outcome mine = outcome_of(act, thrown);
  std::vector<Outcome> outcomes;
  const auto collect = [&] {
    const auto texts = exchange.to_first(label, mine.encode());
    if (world.rank() == 0) outcomes = decode_all(texts, label);
    return std::string();
  };
  const auto publish = [&] {
    std::vector<std::string> results;
    for (auto& outcome : outcomes) results.push_back(std::move(outcome.result));
    finish(results);
    return std::string();
  };
  Outcome all = outcome_of(collect, lost);  // what rank 0 tells the others
  if (!thrown) thrown = lost;
  if (world.rank() == 0) {
    const auto failure = first_failure(outcomes);
    if (!all.failure && !failure) all = outcome_of(publish, thrown);
    if (all.failure)
      all.failure = named(0, *all.failure);
    else
      all.failure = failure;
  }
  const auto hear = [&] { return exchange.from_first(label, all.encode()); };
  const Outcome heard = outcome_of(hear, unheard);
  if (thrown) std::rethrow_exception(thrown);
  if (unheard) std::rethrow_exception(unheard);
  const auto told = Outcome::decode(heard.result, formatted("{}: rank 0", label));
  if (told.failure) throw *told.failure;
}

}  // namespace fsdp::checkpoint
