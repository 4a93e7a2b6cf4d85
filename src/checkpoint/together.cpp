#include "checkpoint/together.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>

#include "base/format.h"
#include "comm/store.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

// Gathers a text from each rank: first the lengths, then everything padded to the longest.
std::vector<std::string> all_texts(const World& world, const std::string& label,
                                   const std::string& mine) {
  const int64_t ranks = world.size();
  if (ranks == 1) return {mine};
  const auto device = world.device();
  const at::Tensor length =
      at::tensor({static_cast<int64_t>(mine.size())}, at::TensorOptions(at::kLong)).to(device);
  at::Tensor lengths = at::empty({ranks}, length.options());
  world.comm().all_gather(lengths, length, {.label = label});
  lengths = lengths.cpu();
  const int64_t longest = lengths.max().item<int64_t>();
  std::vector<std::string> texts(ranks);
  if (longest == 0) return texts;
  at::Tensor sent = at::zeros({longest}, at::TensorOptions(at::kByte));
  std::memcpy(sent.data_ptr(), mine.data(), mine.size());
  sent = sent.to(device);
  at::Tensor all = at::empty({ranks * longest}, sent.options());
  world.comm().all_gather(all, sent, {.label = label});
  all = all.cpu();
  const auto* bytes = static_cast<const char*>(all.const_data_ptr());
  for (int64_t r = 0; r < ranks; ++r)
    texts[r].assign(bytes + r * longest, lengths[r].item<int64_t>());
  return texts;
}

// The outcome of an action as text: "+" and the result, or "-" and the message, a zero byte and the
// hint.
std::string outcome_of(const std::function<std::string()>& act, std::exception_ptr& own) {
  try {
    std::string text = "+";
    text += act();
    return text;
  } catch (const Error& error) {
    own = std::current_exception();
    return "-" + error.message() + std::string(1, '\0') + error.hint();
  } catch (const std::exception& error) {
    own = std::current_exception();
    return std::string("-") + error.what() + std::string(1, '\0');
  }
}

bool failed(const std::string& outcome) {
  return !outcome.starts_with('+');
}

[[noreturn]] void throw_failure(const std::string& outcome, const std::string& who) {
  const size_t cut = std::min(outcome.find('\0'), outcome.size());
  const std::string hint = cut < outcome.size() ? outcome.substr(cut + 1) : "";
  throw Error(who + outcome.substr(1, cut - 1), hint);
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
    store_->set(path(key, 0), std::to_string(pieces) + "\n" + text.substr(0, kTextPiece));
  }

  std::string take(const std::string& key, int rank, const std::string& label) const {
    const std::string what = formatted("{}: waiting for rank {}", label, rank);
    const auto limit = 12 * world_.timeout();
    if (!comm::await_keys(store_, {path(key, 0)}, limit, what, [this] { return world_.trouble(); }))
      throw Error(formatted("{}: no answer in {} s.", what, limit.count() / 1000),
                  "check that the process is running and how fast it can write; FSDP_TIMEOUT "
                  "(seconds) allows more time.");
    std::string text = store_->get_to_str(path(key, 0));
    const size_t line = text.find('\n');
    const size_t pieces = std::stoul(text.substr(0, line));
    text.erase(0, line + 1);
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

}  // namespace

void together(const World& world, const std::string& label, const std::function<void()>& act) {
  std::exception_ptr own;
  const auto acted = [&] {
    act();
    return std::string();
  };
  const auto texts = all_texts(world, label, outcome_of(acted, own));
  if (own) std::rethrow_exception(own);
  for (size_t rank = 0; rank < texts.size(); ++rank)
    if (failed(texts[rank])) throw_failure(texts[rank], "rank " + std::to_string(rank) + ": ");
}

std::string marks(const World& world, const std::string& label, char mine) {
  std::string all;
  for (const auto& text : all_texts(world, label, std::string(1, mine))) all += text;
  return all;
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
            if (rank != 0) {
              texts->post("to/" + std::to_string(rank), mine);
              return all;
            }
            for (int r = 1; r < size; ++r)
              all.push_back(texts->take("to/" + std::to_string(r), r, label));
            return all;
          },
          [texts, rank, size](const std::string& label, const std::string& mine) {
            if (size == 1) return mine;
            if (rank != 0) return texts->take("from", 0, label);
            texts->post("from", mine);
            return mine;
          }};
}

void commit(const World& world, const Exchange& exchange, const std::string& label,
            const std::function<std::string()>& act,
            const std::function<void(const std::vector<std::string>&)>& finish) {
  std::exception_ptr own;
  const std::string mine = outcome_of(act, own);
  std::vector<std::string> texts;
  const auto collect = [&] {
    texts = exchange.to_first(label, mine);
    return std::string();
  };
  const auto publish = [&] {
    for (auto& text : texts) text.erase(0, 1);
    finish(texts);
    return std::string();
  };
  std::exception_ptr lost;
  std::string result = outcome_of(collect, lost);
  if (!own) own = lost;
  if (world.rank() == 0) {  // any failure here is reported to the other ranks
    if (failed(result)) result.insert(1, "rank 0: ");
    for (size_t rank = 0; rank < texts.size() && !failed(result); ++rank)
      if (failed(texts[rank])) result = formatted("-rank {}: {}", rank, texts[rank].substr(1));
    if (!failed(result)) {
      result = outcome_of(publish, own);
      if (failed(result)) result.insert(1, "rank 0: ");
    }
  }
  std::exception_ptr unheard;
  const auto hear = [&] { return exchange.from_first(label, result); };
  const std::string heard = outcome_of(hear, unheard);
  if (own) std::rethrow_exception(own);
  if (unheard) std::rethrow_exception(unheard);
  if (failed(heard.substr(1))) throw_failure(heard.substr(1), "");
}

}  // namespace fsdp::checkpoint
