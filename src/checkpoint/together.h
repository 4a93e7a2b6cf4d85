// What ranks must do together when they save and load: exchange small texts, and fail as one.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "fsdp/world.h"

namespace fsdp::checkpoint {

// Runs `act` on this rank. If it throws on any rank, then every rank throws an Error, which names
// the first rank that failed and carries its words. Collective; `label` names it when a rank does
// not come.
void together(const World& world, const std::string& label, const std::function<void()>& act);

// One letter of every rank, by rank. Collective.
std::string marks(const World& world, const std::string& label, char mine);

// A way of texts to rank 0 and back.
struct Exchange {
  // What every rank gave, by rank; on other ranks than 0 it may be empty.
  std::function<std::vector<std::string>(const std::string& label, const std::string& mine)>
      to_first;
  // What rank 0 gave.
  std::function<std::string(const std::string& label, const std::string& mine)> from_first;
};
Exchange by_collectives(const World& world);
// For another thread than the one that trains: goes through the store of the rendezvous, over a
// connection of its own, and so neither disturbs the order of collectives nor waits for them. Ranks
// may be done at very different times: it waits as long as they live, twelve times the world's
// timeout at most. `name` must be the same on every rank and new.
Exchange by_store(const World& world, const std::string& name);

// Runs `act` on every rank, then `finish` with what they returned on rank 0. If anything fails, it
// fails as in together().
void commit(const World& world, const Exchange& exchange, const std::string& label,
            const std::function<std::string()>& act,
            const std::function<void(const std::vector<std::string>&)>& finish);

}  // namespace fsdp::checkpoint
