// What ranks do together when they save and load: exchange small texts, and fail together.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fsdp/world.h"

namespace fsdp::checkpoint {

// Runs `act` on this rank. If it throws on any rank, every rank throws an Error that names the
// first rank that failed and carries its message. Collective; `label` names the call in timeouts.
void together(const World& world, const std::string& label, const std::function<void()>& act);

// The same; returns what `act` returned on rank 0.
std::string told_by_first(const World& world, const std::string& label,
                          const std::function<std::string()>& act);

// The largest of every rank's value: a flag, a number or an enumerator. Collective.
int64_t largest_number(const World& world, const std::string& label, int64_t mine);
template <typename T>
T largest(const World& world, const std::string& label, T mine) {
  return static_cast<T>(largest_number(world, label, static_cast<int64_t>(mine)));
}

// Every rank's text, in rank order. Collective.
std::vector<std::string> texts_of_all(const World& world, const std::string& label,
                                      const std::string& mine);

// Sends texts to rank 0 and back.
struct Exchange {
  // Returns every rank's text, in rank order; may be empty on ranks other than 0.
  std::function<std::vector<std::string>(const std::string& label, const std::string& mine)>
      to_first;
  // Returns rank 0's text.
  std::function<std::string(const std::string& label, const std::string& mine)> from_first;
  // Drops what rank 0 sent, once all ranks have it.
  std::function<void()> forget;
  // Tells the others, who wait for this rank, that it has done more work: `done` has grown. Called
  // by the thread that exchanges, as often as it likes. May be empty.
  std::function<void(int64_t done)> progress = {};
};
Exchange by_collectives(const World& world);
// For background threads: over the store of the rendezvous. Collectives there would have to come in
// one order with those of the training thread. On a GPU they would also occupy it while ranks wait
// for each other's disks, and break the capture of a step. A call to the store takes a connection
// of its own and holds up nobody. Ranks may finish at very different times: a slow disk isn't a
// dead rank. So the world's timeout counts from the last progress that the awaited rank has shown,
// or that those have shown for which it waits. `name` must be unused and the same on every rank.
Exchange by_store(const World& world, const std::string& name);

// Runs `act` on every rank, then `finish` on rank 0 with all results. Failures are handled as in
// together().
void commit(const World& world, const Exchange& exchange, const std::string& label,
            const std::function<std::string()>& act,
            const std::function<void(const std::vector<std::string>&)>& finish);

}  // namespace fsdp::checkpoint
