// What ranks must do together when they save and load: exchange small texts, and fail as one.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "fsdp/world.h"

namespace fsdp::checkpoint {

// Runs `act` on this rank and gathers what it returns: every rank's text, by rank. If it throws on
// any rank, then every rank throws an Error, which names the first rank that failed and carries its
// words. Collective; `label` names it when a rank does not come.
std::vector<std::string> gather(const World& world, const std::string& label,
                                const std::function<std::string()>& act);

// The same where nothing is returned.
void together(const World& world, const std::string& label, const std::function<void()>& act);

}  // namespace fsdp::checkpoint
