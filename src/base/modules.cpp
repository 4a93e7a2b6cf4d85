#include "base/modules.h"

#include <dlfcn.h>

#include <map>

#include "base/format.h"
#include "base/mutex.h"
#include "fsdp/error.h"

namespace fsdp::base {
namespace {

struct Loaded {
  void* handle = nullptr;
  std::string why;
};

std::string own_folder() {
  Dl_info info{};
  if (!dladdr(reinterpret_cast<void*>(&find_library), &info) || !info.dli_fname) return "";
  std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/') + 1);
}

Loaded load(const std::string& name) {
  std::string file = own_folder() + "libfsdp_" + name + ".so";
  // RTLD_GLOBAL because MPI loads plugins of its own that look up its symbols.
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);
  return handle ? Loaded{handle, ""} : Loaded{nullptr, dlerror()};
}

}  // namespace

void* find_library(const std::string& name, std::string* why) {
  static Mutex mutex;
  static std::map<std::string, Loaded> loaded FSDP_GUARDED_BY(mutex);
  Lock lock(mutex);
  auto known = loaded.find(name);
  if (known == loaded.end()) known = loaded.emplace(name, load(name)).first;
  if (why) *why = known->second.why;
  return known->second.handle;
}

void* require_library(const std::string& name) {
  std::string why;
  if (void* handle = find_library(name, &why)) return handle;
  bool mpi = name == "mpi";
  throw Error(formatted("{} is not available: {}.", mpi ? "the mpi backend" : "CUDA", why),
              mpi ? "install libopenmpi-dev and openmpi-bin, then build again (./fsdp does both)."
                  : "it needs a build with nvcc and a LibTorch with CUDA; fsdp doctor shows both.");
}

void load_cuda_module() {
  static void* const handle = require_library("cuda");
  static_cast<void>(handle);
}

}  // namespace fsdp::base
