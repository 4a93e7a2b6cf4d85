#include "checkpoint/together.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <optional>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/log.h"
#include "checkpoint/messages.h"
#include "comm/store.h"
#include "fsdp/error.h"
#include "fsdp/out_of_memory.h"

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

CodedError coded(const std::exception& problem) {
  const auto code = is_out_of_memory(problem) ? kExitNoMemory : exit_code(problem);
  if (const auto* error = dynamic_cast<const Error*>(&problem))
    return {code, error->message(), error->hint()};
  return {code, log::plain(problem), ""};
}

// Runs an action. What it throws is also kept in `thrown`, to be rethrown on this rank as it was.
Outcome outcome_of(const std::function<std::string()>& act, std::exception_ptr& thrown) {
  try {
    return {act()};
  } catch (const std::exception& problem) {
    thrown = std::current_exception();
    return {"", coded(problem)};
  }
}

// With the rank in the failure's message.
Outcome named(int rank, const Outcome& outcome) {
  const CodedError& failure = *outcome.failure;
  return {"", CodedError(failure.code(), formatted("rank {}: {}", rank, failure.message()),
                         failure.hint())};
}

std::vector<Outcome> decode_all(const std::vector<std::string>& texts, const std::string& label) {
  std::vector<Outcome> outcomes;
  for (const auto& text : texts)
    outcomes.push_back(Outcome::decode(text, formatted("{}: rank {}", label, outcomes.size())));
  return outcomes;
}

// The failure of the first rank that failed.
std::optional<Outcome> first_failure(const std::vector<Outcome>& outcomes) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank)
    if (outcomes[rank].failure) return named(static_cast<int>(rank), outcomes[rank]);
  return std::nullopt;
}

// --- texts in the store, in pieces because the size of a value is limited ---

constexpr size_t kTextPiece = 4 << 20, kMostPieces = 256;

class StoredTexts {
 public:
  StoredTexts(World world, std::string name)
      : world_(std::move(world)),
        store_(world_.store()),
        signs_(store_),
        name_(std::move(name)),
        interval_(
            std::min<std::chrono::milliseconds>(std::chrono::seconds(1), world_.timeout() / 8)) {}

  void post(const std::string& key, const std::string& text, const std::string& label) {
    const auto put = [&](size_t piece, const std::string& value) {
      comm::put(store_, path(key, piece), value, world_.timeout(), label);
    };
    const size_t pieces = text.size() / kTextPiece + 1;
    posted_[key] = pieces;
    for (size_t i = 1; i < pieces; ++i) put(i, text.substr(i * kTextPiece, kTextPiece));
    // The first piece comes last: a reader that sees it finds all of them.
    put(0, FirstPiece{pieces, text.substr(0, kTextPiece)}.encode());
  }

  std::string take(const std::string& key, int rank, const std::string& label) {
    const std::string what = formatted("{}: waiting for rank {}", label, rank);
    await(key, rank, what);
    const auto get = [&](size_t piece) {
      return comm::fetch(store_, path(key, piece), world_.timeout(), what,
                         [this] { return world_.trouble(); });
    };
    auto [pieces, text] = FirstPiece::decode(get(0), sender(label, rank, path(key, 0)));
    check_length(text.size(), 0, pieces, rank, label, key);
    for (size_t i = 1; i < pieces; ++i) {
      const std::string piece = get(i);
      check_length(piece.size(), i, pieces, rank, label, key);
      text += piece;
    }
    if (rank != 0) {
      remove(key, pieces);
      erase(sign_path(rank));
    }
    return text;
  }

  void remove(const std::string& key) {  // what post() stored
    if (const auto posted = posted_.find(key); posted != posted_.end()) remove(key, posted->second);
  }

  void progress(int64_t done) {
    const auto now = std::chrono::steady_clock::now();
    if (now - shown_ < interval_) return;
    shown_ = now;
    show(formatted("has written {} bytes", done));
  }

 private:
  // Begins the error for a message of this rank.
  static std::string sender(const std::string& label, int rank, const std::string& key) {
    return formatted("{}: rank {} (store key {})", label, rank, key);
  }
  std::string path(const std::string& key, size_t piece) const {
    return formatted("fsdp/exchange/{}/{}/{}", name_, key, piece);
  }
  std::string sign_path(int rank) const {
    return formatted("fsdp/exchange/{}/progress/{}", name_, rank);
  }

  void await(const std::string& key, int rank, const std::string& what) {
    std::optional<std::string> sign;
    const auto look = [&] {
      std::string next = sign_of(rank).value_or(sign.value_or(""));
      // The others wait for rank 0, which goes on because this rank does.
      if (world_.rank() == 0 && next != sign)
        show(formatted("waits for rank {} ({})", rank, ++waited_));
      sign = next;
      return next;
    };
    const auto trouble = [this] { return world_.trouble(); };
    if (comm::await_keys(store_, {path(key, 0)}, world_.timeout(), what, trouble, look)) return;
    throw CodedError(kExitLostRank,
                     formatted("{}{}: no progress in {} s.", what, doing(sign.value_or("")),
                               world_.timeout().count() / 1000),
                     "check whether that process is running, and its disk; FSDP_TIMEOUT (seconds) "
                     "allows more time.");
  }

  // Without an answer from the store nobody sees progress, and the timeout decides.
  void show(const std::string& sign) {
    try {
      signs_.set(sign_path(world_.rank()), sign);
    } catch (const std::exception&) {
    }
  }
  std::optional<std::string> sign_of(int rank) {  // nullopt: the store gives no answer
    try {
      return signs_.get(sign_path(rank)).value_or("");
    } catch (const std::exception&) {
      return std::nullopt;
    }
  }
  void remove(const std::string& key, size_t pieces) {
    for (size_t i = 0; i < pieces; ++i) erase(path(key, i));
  }
  void erase(const std::string& key) {
    try {
      signs_.erase(key);
    } catch (const std::exception&) {  // only a little memory of the store
    }
  }

  // ", which waits for rank 3" or ", which has written 7 bytes".
  static std::string doing(const std::string& sign) {
    return sign.empty() ? "" : ", which " + sign.substr(0, sign.find(" ("));
  }

  // All pieces but the last are full.
  void check_length(size_t length, size_t piece, size_t pieces, int rank, const std::string& label,
                    const std::string& key) const {
    const bool last = piece + 1 == pieces;
    if (pieces <= kMostPieces && (last ? length <= kTextPiece : length == kTextPiece)) return;
    throw Error(formatted("{} sent piece {} of {} with {} bytes.",
                          sender(label, rank, path(key, piece)), piece + 1, pieces, length),
                "all ranks must run the same version of the program.");
  }

  World world_;
  comm::Store store_;
  comm::BoundedStore signs_;
  std::string name_;
  std::map<std::string, size_t> posted_;  // pieces
  std::chrono::milliseconds interval_;    // between two signs of progress
  std::chrono::steady_clock::time_point shown_{};
  int64_t waited_ = 0;  // signs of others that this rank has passed on
};

std::string key_to_first(int rank) {
  return formatted("to/{}", rank);
}
constexpr const char* kFromFirst = "from";

}  // namespace

std::string told_by_first(const World& world, const std::string& label,
                          const std::function<std::string()>& act) {
  std::exception_ptr thrown;
  const auto texts = all_texts(world, label, outcome_of(act, thrown).encode());
  if (thrown) std::rethrow_exception(thrown);
  auto outcomes = decode_all(texts, label);
  if (const auto failure = first_failure(outcomes)) failure->fail();
  return std::move(outcomes.front().result);
}

void together(const World& world, const std::string& label, const std::function<void()>& act) {
  told_by_first(world, label, [&] {
    act();
    return std::string();
  });
}

std::vector<std::string> texts_of_all(const World& world, const std::string& label,
                                      const std::string& mine) {
  return all_texts(world, label, mine);
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
          },
          [] {}};
}

Exchange by_store(const World& world, const std::string& name) {
  if (!world.store()) return by_collectives(world);  // a fake world has no other ranks
  const auto texts = std::make_shared<StoredTexts>(world, name);
  const int rank = world.rank(), size = world.size();
  return {[texts, rank, size](const std::string& label, const std::string& mine) {
            std::vector<std::string> all{mine};
            if (rank != 0) texts->post(key_to_first(rank), mine, label);
            for (int r = 1; rank == 0 && r < size; ++r)
              all.push_back(texts->take(key_to_first(r), r, label));
            return all;
          },
          [texts, rank, size](const std::string& label, const std::string& mine) {
            if (rank != 0) return texts->take(kFromFirst, 0, label);
            if (size > 1) texts->post(kFromFirst, mine, label);
            return mine;
          },
          [texts, rank] {
            if (rank == 0) texts->remove(kFromFirst);
          },
          [texts, size](int64_t done) {
            if (size > 1) texts->progress(done);
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
  if (lost && world.rank() != 0) std::rethrow_exception(thrown);  // one timeout is enough
  if (world.rank() == 0) {
    const auto failure = first_failure(outcomes);
    if (!all.failure && !failure) all = outcome_of(publish, thrown);
    if (all.failure)
      all = named(0, all);
    else if (failure)
      all = *failure;
  }
  const auto hear = [&] { return exchange.from_first(label, all.encode()); };
  const Outcome heard = outcome_of(hear, unheard);
  if (thrown) std::rethrow_exception(thrown);
  if (unheard) std::rethrow_exception(unheard);
  const auto told = Outcome::decode(heard.result, formatted("{}: rank 0", label));
  if (told.failure) told.fail();
}

}  // namespace fsdp::checkpoint
