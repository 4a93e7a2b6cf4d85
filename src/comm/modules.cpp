#include "comm/modules.h"

#include <dlfcn.h>

#include "base/format.h"
#include "base/modules.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

const Module* table_of(void* library, const std::string& name) {
  auto entry = reinterpret_cast<const Module* (*)()>(dlsym(library, "fsdp_module"));
  if (!entry)
    throw Error(formatted("libfsdp_{}.so has no fsdp_module.", name), "rebuild the project.");
  return entry();
}

}  // namespace

const Module* find_module(const std::string& name, std::string* why) {
  void* library = find_library(name, why);
  return library ? table_of(library, name) : nullptr;
}

const Module* require_module(const std::string& name) {
  return table_of(require_library(name), name);
}

}  // namespace fsdp::comm
