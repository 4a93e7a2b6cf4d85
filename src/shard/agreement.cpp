#include "shard/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <sstream>

#include "base/format.h"
#include "base/log.h"
#include "fsdp/error.h"
#include "shard/deferred.h"
#include "shard/deferred_draw.h"

namespace fsdp::shard {
namespace {

// Differs for almost any two different tensors. Used to find ranks that built different models.
int64_t checksum(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  at::ScalarType bits = tensor.element_size() == 1   ? at::kChar
                        : tensor.element_size() == 2 ? at::kShort
                        : tensor.element_size() == 4 ? at::kInt
                                                     : at::kLong;
  return tensor.contiguous().view(bits).sum(at::kLong).item<int64_t>();
}

uint64_t hash_of(const std::string& text) {
  uint64_t hash = 1469598103934665603ull;
  for (unsigned char c : text) hash = (hash ^ c) * 1099511628211ull;
  return hash;
}

}  // namespace

void compare_plans(const World& world, const std::vector<PlannedUnit>& planned) {
  if (world.size() == 1) return;
  std::vector<std::string> texts;
  std::vector<int64_t> hashes;
  for (const PlannedUnit& unit : planned)
    for (const Parameter& p : unit.parameters) {
      std::stringstream text;
      text << "\"" << p.name() << "\" " << c10::toString(p.handle.scalar_type()) << " "
           << p.handle.sizes() << (p.handle.requires_grad() ? "" : " frozen") << " in unit \""
           << unit.name << "\"";
      texts.push_back(text.str());
      hashes.push_back(static_cast<int64_t>(hash_of(texts.back())));
    }
  auto gather = [&](std::vector<int64_t> values) {
    at::Tensor mine = at::tensor(values, at::kLong).to(world.device());
    at::Tensor all = at::empty({world.size() * mine.numel()}, mine.options());
    world.comm().all_gather(all, mine, {.label = "fully_shard"});
    return all.cpu().view({world.size(), -1});
  };
  std::string all_texts;
  for (const std::string& text : texts) all_texts += text + "\n";
  at::Tensor totals =
      gather({static_cast<int64_t>(texts.size()), static_cast<int64_t>(hash_of(all_texts))});
  if (totals.eq(totals[0]).all().item<bool>()) return;
  std::string what = formatted("rank {}: ranks shard different models: ", world.rank());
  if (totals.select(1, 0).eq(totals[0][0]).all().item<bool>()) {
    at::Tensor each = gather(hashes);
    for (int64_t i = 0; i < each.size(1); ++i) {
      if (each.select(1, i).eq(each[0][i]).all().item<bool>()) continue;
      what += formatted("parameter {} is {} here.", i, texts[i]);
      break;
    }
  } else {
    what += formatted("this one has {} parameters to shard.", texts.size());
  }
  throw Error(what, "build the same model on every rank and pass fully_shard the same options.");
}

at::Tensor InitialValues::value(const std::string& name, const at::Tensor& tensor) {
  at::Tensor whole = deferred::is_deferred(tensor) ? deferred::value(tensor) : tensor.detach();
  if (whole.is_meta()) return {};
  if (world_.size() == 1) return whole;
  if (!broadcast_) {
    names_.push_back(name);
    checksums_.push_back(checksum(whole));
    return whole;
  }
  at::Tensor sent = whole.contiguous().to(world_.device());
  if (sent.is_same(whole) && world_.rank() != 0) sent = sent.clone();
  if (sent.numel() > 0) world_.comm().broadcast(sent, 0, {.label = name});
  return sent;
}

bool InitialValues::draw(const std::string& name, const at::Tensor& tensor, const at::Tensor& part,
                         int64_t first) {
  if (broadcast_ && world_.size() > 1) return false;
  const std::shared_ptr<const deferred::Draw> draw = deferred::draw_behind(tensor);
  if (!draw) return false;
  if (world_.size() > 1) {
    names_.push_back(name);
    checksums_.push_back(draw->fingerprint());
  }
  if (part.device().is_cpu() && part.scalar_type() == draw->type) {
    draw->fill(part, first);
  } else {
    const at::Tensor drawn = at::empty({part.numel()}, draw->type);
    draw->fill(drawn, first);
    part.copy_(drawn);
  }
  return true;
}

void InitialValues::compare() const {
  if (checksums_.empty()) return;
  at::Tensor mine = at::tensor(checksums_, at::kLong).to(world_.device());
  auto count = static_cast<int64_t>(checksums_.size());
  at::Tensor all = at::empty({world_.size() * count}, mine.options());
  world_.comm().all_gather(all, mine, {.label = "checksums of the parameters"});
  all = all.cpu().view({world_.size(), count});
  for (int64_t i = 0; i < count; ++i)
    for (int rank = 1; rank < world_.size(); ++rank) {
      if (all[rank][i].item<int64_t>() == all[0][i].item<int64_t>()) continue;
      if (world_.rank() == 0)
        log::warn(
            formatted("ranks 0 and {} built different models: \"{}\" is the first parameter "
                      "or buffer that differs. Use the same seed on every rank, or set "
                      ".sync_module_states = true.",
                      rank, names_[i]));
      return;
    }
}

}  // namespace fsdp::shard
