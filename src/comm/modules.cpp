#include "comm/modules.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

struct Loaded {
  const Module* module = nullptr;
  std::string why;
};

// Modules lie beside this library, in the build folder and when installed.
std::string own_folder() {
  Dl_info info{};
  if (!dladdr(reinterpret_cast<void*>(&find_module), &info) || !info.dli_fname) return "";
  std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/') + 1);
}

Loaded load(const std::string& name) {
  std::string file = own_folder() + "libfsdp_" + name + ".so";
  // Global, because MPI loads plugins of its own that look for its symbols.
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (!library) return {nullptr, dlerror()};
  auto entry = reinterpret_cast<const Module* (*)()>(dlsym(library, "fsdp_module"));
  if (!entry) return {nullptr, file + " has no fsdp_module"};
  return {entry(), ""};
}

}  // namespace

const Module* find_module(const std::string& name, std::string* why) {
  static std::mutex mutex;
  static std::map<std::string, Loaded> loaded;
  std::lock_guard lock(mutex);
  auto known = loaded.find(name);
  if (known == loaded.end()) known = loaded.emplace(name, load(name)).first;
  if (why) *why = known->second.why;
  return known->second.module;
}

const Module* require_module(const std::string& name) {
  std::string why;
  if (const Module* module = find_module(name, &why)) return module;
  bool mpi = name == "mpi";
  throw Error(std::string(mpi ? "the mpi backend" : "CUDA") + " is not available: " + why + ".",
              mpi ? "install libopenmpi-dev and openmpi-bin, then build again (./fsdp does both)."
                  : "it needs a build with nvcc and a LibTorch with CUDA; fsdp doctor shows both.");
}

}  // namespace fsdp::comm
