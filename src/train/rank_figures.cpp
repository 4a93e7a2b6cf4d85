#include "train/rank_figures.h"

#include <ATen/ops/empty.h>
#include <unistd.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "base/process.h"
#include "fsdp/communicator.h"

namespace fsdp::train {

namespace {

// One entry per rank, in rank order. Collective.
template <typename Facts>
std::vector<Facts> gather_facts(const World& world, const Facts& own, const char* label) {
  static_assert(std::is_trivially_copyable_v<Facts>);
  if (world.size() == 1) return {own};
  constexpr auto kSize = static_cast<int64_t>(sizeof(Facts));
  at::Tensor mine = at::empty({kSize}, at::kByte);
  std::memcpy(mine.data_ptr(), &own, sizeof(own));
  mine = mine.to(world.device());
  at::Tensor all = at::empty({kSize * world.size()}, mine.options());
  world.comm().all_gather(all, mine, {.label = label});
  all = all.cpu();
  std::vector<Facts> ranks(static_cast<size_t>(world.size()));
  std::memcpy(ranks.data(), all.data_ptr(), sizeof(Facts) * ranks.size());
  return ranks;
}

template <size_t kSize>
void fill(char (&field)[kSize], const std::string& text) {
  std::strncpy(field, text.c_str(), kSize - 1);
}

}  // namespace

std::vector<RankFigures> gather_figures(const World& world, RankFigures own) {
  fill(own.host, host_name());
  return gather_facts(world, own, "figures of the ranks");
}

nlohmann::ordered_json gather_processes(const World& world) {
  struct Place {
    int32_t pid = 0;
    char host[64] = "", identity[128] = "";
  } own;
  own.pid = getpid();
  fill(own.host, host_name());
  fill(own.identity, host_identity());
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const Place& place : gather_facts(world, own, "processes of the ranks"))
    all.push_back({{"rank", all.size()},
                   {"pid", place.pid},
                   {"host", place.host},
                   {"host_identity", place.identity}});
  return all;
}

nlohmann::ordered_json to_json(const std::vector<RankFigures>& ranks) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    all.push_back({{"rank", rank},
                   {"host", ranks[rank].host},
                   {"step_ms", ranks[rank].step_ms},
                   {"data_ms", ranks[rank].data_ms},
                   {"comm_ms", ranks[rank].comm_ms},
                   {"wait_ms", ranks[rank].wait_ms},
                   {"memory_mb", ranks[rank].memory_mb}});
  return all;
}

}  // namespace fsdp::train
