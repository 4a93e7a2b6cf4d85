#include "train/from_rank_0.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdlib>

#include "base/exit_code.h"
#include "comm/store.h"

namespace fsdp::train {

std::string from_rank_0(const World& world, const std::string& key,
                        const std::function<std::string()>& say) {
  c10::intrusive_ptr<c10d::Store> store = world.store();
  if (world.size() == 1 || !store) return say();  // a fake world has no other ranks
  const std::string what = "starting the run (" + key + ")";
  const auto put = [&](const std::string& text) {
    comm::put(store, key, text, world.timeout(), what);
  };
  if (world.rank() == 0) {
    try {
      std::string text = say();
      put("=" + text);
      return text;
    } catch (const std::exception& problem) {
      put(std::to_string(exit_code(problem)));
      throw;
    }
  }
  const std::string text = comm::fetch(store, key, world.timeout(), what + ": waiting for rank 0",
                                       [&] { return world.trouble(); });
  if (!text.starts_with("="))
    throw CodedError(static_cast<ExitCode>(std::atoi(text.c_str())),
                     "rank 0 couldn't start the run.", "see its error message.");
  return text.substr(1);
}

}  // namespace fsdp::train
