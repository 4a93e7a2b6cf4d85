#include "comm/settings.h"

#include <unistd.h>

#include <climits>
#include <cstdlib>

#include "base/environment.h"
#include "base/format.h"
#include "comm/config.h"
#include "fsdp/error.h"

namespace fsdp::comm {

std::string asked_backend(const std::string& option) {
  std::string asked = option;
  if (asked.empty()) asked = environment::text("FSDP_BACKEND").value_or("auto");
  if (asked == "fake" || parse_enum<CommBackend>(asked)) return asked;
  throw Error(formatted("there is no backend \"{}\".", asked),
              "choose shm, mpi, nccl, fake or auto (FSDP_BACKEND, or InitOptions::backend).");
}

std::chrono::milliseconds asked_timeout(std::chrono::milliseconds option) {
  if (option.count() > 0) return option;
  int64_t seconds = environment::integer("FSDP_TIMEOUT").value_or(300);
  if (seconds < 1 || seconds > 1000000)
    throw Error(formatted("FSDP_TIMEOUT={} isn't a valid timeout.", seconds),
                "set it to 1 to 1000000 seconds, or unset it.");
  return std::chrono::seconds(seconds);
}

bool gpu_present() {
  for (const char* path : {"/dev/nvidia0", "/proc/driver/nvidia/gpus", "/dev/dxg"})
    if (access(path, F_OK) == 0) return true;
  return false;
}

bool gpus_hidden() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return visible && (!*visible || std::string(visible) == "-1");
}

int asked_fake_size(int option, int otherwise) {
  if (option > 0) return option;
  int64_t size = environment::integer("FSDP_FAKE_WORLD").value_or(otherwise);
  if (size < 1 || size > INT_MAX)
    throw Error(formatted("FSDP_FAKE_WORLD={} isn't a valid number of ranks.", size),
                "set it to 1 or more, or unset it.");
  return static_cast<int>(size);
}

}  // namespace fsdp::comm
