// Probes of what is installed: this build, LibTorch, CUDA, GPUs, NCCL, MPI, and a Python with torch
// for comparisons. CUDA is loaded only if there is a GPU: loading takes a second.
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <regex>
#include <sstream>

#include "base/environment.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "base/subprocess.h"
#include "cli/probes.h"
#include "comm/modules.h"
#include "comm/settings.h"
#include "fsdp/version.h"

namespace fsdp::cli {
namespace {

namespace fs = std::filesystem;

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

bool backend_asked(const std::string& name) {
  return environment::text("FSDP_BACKEND") == name;
}

// Modules are in the directory of the library that holds find_module.
bool module_built(const std::string& name) {
  Dl_info info{};
  if (!dladdr(reinterpret_cast<void*>(&comm::find_module), &info) || !info.dli_fname) return false;
  return is_there(fs::path(info.dli_fname).parent_path() / formatted("libfsdp_{}.so", name));
}

const comm::Module* cuda_module(std::string* why = nullptr) {
  return comm::gpu_present() ? comm::find_module("cuda", why) : nullptr;
}

// The folder of the LibTorch that this process runs with: a package may hold a different copy from
// the one it was built with.
fs::path libtorch_folder() {
  void* handle = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  link_map* library = nullptr;
  if (!handle || dlinfo(handle, RTLD_DI_LINKMAP, &library) != 0) return "";
  std::error_code ignored;
  return fs::weakly_canonical(library->l_name, ignored).parent_path().parent_path();
}

// "13.0", as the wheel's version.py says; empty for other LibTorches.
std::string cuda_version() {
  std::istringstream file(read_if_there(libtorch_folder() / "version.py"));
  static const std::regex wanted("^cuda[^=]*= '([0-9.]+)'");
  std::smatch match;
  for (std::string line; std::getline(file, line);)
    if (std::regex_search(line, match, wanted)) return match[1];
  return "";
}

// The Python wheel has cuDNN beside torch/, the C++ archive in lib/. Without cuDNN the CUDA
// libraries don't load: ./fsdp leaves it out, 5 GB, on machines without a GPU.
bool cuda_flavour() {
  fs::path torch = libtorch_folder();
  if (!is_there(torch / "lib/libtorch_cuda.so")) return false;
  for (const char* place : {"../nvidia/cudnn/lib", "lib/libcudnn.so", "lib/libcudnn.so.9"})
    if (is_there(torch / place)) return true;
  return cuda_module();
}

// "2.11.0 (CUDA 13.0)"
std::string libtorch_version() {
  bool cuda = cuda_flavour();
  std::string version = cuda ? cuda_version() : "";
  std::string flavour = !cuda ? "CPU only" : version.empty() ? "CUDA" : "CUDA " + version;
  return formatted("{} ({})", FSDP_TORCH_VERSION, flavour);
}

}  // namespace

void Finding::complain(Status how, const std::string& what_to_do) {
  status = std::max(status, how);
  hint += (hint.empty() ? "" : " ") + what_to_do;
}

Finding probe_fsdp() {
#ifdef __OPTIMIZE__
  return {FSDP_VERSION " in " + own_binary()};
#else
  return {FSDP_VERSION ", not optimised, in " + own_binary(), Finding::kNote,
          "debug builds are slow; configure with -DCMAKE_BUILD_TYPE=Release."};
#endif
}

Finding probe_compiler() {
  return {FSDP_BUILT_WITH};
}

std::string versions() {
  return formatted("fsdp.cpp {}, {}; LibTorch {}", FSDP_VERSION, FSDP_BUILT_WITH,
                   libtorch_version());
}

Finding probe_libtorch() {
  Finding finding{formatted("{} in {}", libtorch_version(), libtorch_folder())};
  if (comm::gpu_present() && !cuda_flavour())
    finding.complain(Finding::kNote,
                     "this LibTorch can't use the GPU of this host; run ./fsdp clean, and the next "
                     "call of ./fsdp fetches a LibTorch with CUDA.");
  return finding;
}

Finding probe_cuda_library() {
  if (!module_built("cuda")) {
    std::string why = *FSDP_CUDA_WHY ? FSDP_CUDA_WHY : "its file is missing";
    Finding finding{"not built: " + why};
    if (comm::gpu_present())
      finding.complain(
          Finding::kNote,
          "GPUs can't be used without it; install the CUDA toolkit (nvcc) and a LibTorch "
          "with CUDA, then build again.");
    return finding;
  }
  if (!comm::gpu_present()) return {"built, not loaded: no GPU"};
  std::string why;
  const comm::Module* cuda = cuda_module(&why);
  if (!cuda)
    return {
        "built, but can't be loaded", Finding::kNote,
        formatted("GPUs can't be used: {}. The LibTorch row says whether it has CUDA libraries.",
                  why)};
  int devices = cuda->devices();
  Finding finding{formatted("loaded, finds {} GPU{}", devices, devices == 1 ? "" : "s")};
  if (devices == 0 && !comm::gpus_hidden())
    finding.complain(
        Finding::kProblem,
        formatted(
            "there is a GPU, but CUDA can't use it; usually the driver is too old for CUDA {}: "
            "compare with nvidia-smi.",
            cuda_version()));
  return finding;
}

Finding probe_gpus() {
  // Bounded: a broken driver can hang nvidia-smi.
  Finished smi =
      run_program({"timeout", "20", "nvidia-smi", "--query-gpu=name,memory.total,driver_version",
                   "--format=csv,noheader"});
  if (smi.code != 0 || smi.output.empty()) {
    if (!comm::gpu_present()) return {"none"};
    std::string how = smi.code == 127   ? "there is no nvidia-smi"
                      : smi.code == 124 ? "nvidia-smi doesn't answer"
                                        : formatted("nvidia-smi fails with code {}", smi.code);
    return {"device files, but " + how, Finding::kProblem,
            "the driver and its tools don't match, or the container wasn't given the GPU; run "
            "nvidia-smi by hand, reinstall the driver, or start the container with --gpus all."};
  }
  std::map<std::string, int> kinds;  // "NVIDIA H200, 143771 MiB, 570.86": how many
  std::istringstream lines(smi.output);
  for (std::string line; std::getline(lines, line);)
    if (!line.empty()) ++kinds[line];
  Finding finding;
  for (const auto& [kind, count] : kinds) {
    size_t driver = kind.rfind(", ");
    finding.found +=
        formatted("{}{} x {}", finding.found.empty() ? "" : "; ", count, kind.substr(0, driver));
    if (driver != std::string::npos) finding.found += ", driver " + kind.substr(driver + 2);
  }
  if (comm::gpus_hidden())
    finding.complain(Finding::kNote, "CUDA_VISIBLE_DEVICES hides every GPU; unset it to use GPUs.");
  return finding;
}

Finding probe_nccl() {
  if (const comm::Module* cuda = cuda_module()) return {cuda->describe()};
  if (backend_asked("nccl"))
    return {"not loaded", Finding::kProblem,
            "FSDP_BACKEND asks for nccl, which needs a GPU and the CUDA library; see their rows, "
            "or set FSDP_BACKEND to shm or mpi."};
  if (comm::gpu_present())
    return {"not loaded", Finding::kNote, "it comes with the CUDA library; see that row."};
  return {"not loaded: no GPU"};
}

Finding probe_mpi() {
  std::string why;
  const comm::Module* mpi = comm::find_module("mpi", &why);
  Finding::Status how = backend_asked("mpi") ? Finding::kProblem : Finding::kNote;
  Finding finding;
  if (mpi) {
    finding.found = mpi->describe();
  } else {
    finding.found = module_built("mpi") ? "built, but can't be loaded" : "not built";
    finding.complain(
        how, formatted("{}the mpi backend needs it: install libopenmpi-dev and openmpi-bin, "
                       "then run ./fsdp again.",
                       module_built("mpi") ? why + "; " : ""));
  }
  if (run_program({"timeout", "20", "mpirun", "--version"}).code == 127) {
    finding.found += ", no mpirun on PATH";
    if (mpi) finding.complain(Finding::kNote, "mpirun starts the ranks: install openmpi-bin.");
  }
  return finding;
}

Finding probe_python() {
  std::string python = environment::text("FSDP_TEST_PYTHON").value_or("python3");
  // Finds torch without importing it, which takes seconds.
  Finished finished =
      run_program({"timeout", "60", python, "-c",
                   "import importlib.util as u, sys; sys.exit(0 if u.find_spec('torch') else 3)"});
  if (finished.code == 0) return {python + " has torch"};
  std::string found = finished.code == 3 ? python + " has no torch" : python + " can't be run";
  return {found, Finding::kNote,
          "only comparisons need it (fsdp bench leaves PyTorch out): pip install torch, or set "
          "FSDP_TEST_PYTHON to a Python that has torch."};
}

}  // namespace fsdp::cli
