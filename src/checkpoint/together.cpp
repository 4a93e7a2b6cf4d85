#include "checkpoint/together.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

// A text from each rank: first the lengths, then everything padded to the longest.
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

}  // namespace

std::vector<std::string> gather(const World& world, const std::string& label,
                                const std::function<std::string()>& act) {
  // "+" and the text, or "-" and the message, a zero, the hint.
  std::string mine;
  std::exception_ptr own;
  try {
    mine = "+";
    mine += act();
  } catch (const Error& error) {
    own = std::current_exception();
    mine = "-" + error.message() + std::string(1, '\0') + error.hint();
  } catch (const std::exception& error) {
    own = std::current_exception();
    mine = std::string("-") + error.what() + std::string(1, '\0');
  }
  auto texts = all_texts(world, label, mine);
  if (own) std::rethrow_exception(own);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].starts_with('+')) continue;
    const size_t cut = std::min(texts[rank].find('\0'), texts[rank].size());
    const std::string hint = cut < texts[rank].size() ? texts[rank].substr(cut + 1) : "";
    throw Error("rank " + std::to_string(rank) + ": " + texts[rank].substr(1, cut - 1), hint);
  }
  for (auto& text : texts) text.erase(0, 1);
  return texts;
}

void together(const World& world, const std::string& label, const std::function<void()>& act) {
  gather(world, label, [&] {
    act();
    return std::string();
  });
}

}  // namespace fsdp::checkpoint
