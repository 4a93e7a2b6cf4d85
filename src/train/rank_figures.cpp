#include "train/rank_figures.h"

#include <ATen/ops/empty.h>
#include <unistd.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "fsdp/communicator.h"

namespace fsdp::train {

static_assert(std::is_trivially_copyable_v<RankFigures>);

std::vector<RankFigures> gather_figures(const World& world, RankFigures own) {
  if (::gethostname(own.host, sizeof(own.host)) != 0) own.host[0] = 0;
  own.host[sizeof(own.host) - 1] = 0;
  if (world.size() == 1) return {own};
  constexpr auto kSize = static_cast<int64_t>(sizeof(RankFigures));
  at::Tensor mine = at::empty({kSize}, at::kByte);
  std::memcpy(mine.data_ptr(), &own, sizeof(own));
  mine = mine.to(world.device());
  at::Tensor all = at::empty({kSize * world.size()}, mine.options());
  world.comm().all_gather(all, mine, {.label = "figures of the ranks"});
  all = all.cpu();
  std::vector<RankFigures> ranks(static_cast<size_t>(world.size()));
  std::memcpy(ranks.data(), all.data_ptr(), sizeof(RankFigures) * ranks.size());
  return ranks;
}

nlohmann::ordered_json to_json(const std::vector<RankFigures>& ranks) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    all.push_back({{"rank", rank},
                   {"host", ranks[rank].host},
                   {"step_ms", ranks[rank].step_ms},
                   {"data_ms", ranks[rank].data_ms},
                   {"comm_ms", ranks[rank].comm_ms},
                   {"memory_mb", ranks[rank].memory_mb}});
  return all;
}

}  // namespace fsdp::train
