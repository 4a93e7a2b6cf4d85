// Probes of what is installed: this build, LibTorch, CUDA, GPUs, NCCL, MPI, and a Python to compare
// with. CUDA is loaded only where there is a GPU: it takes a second.
#include <dlfcn.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>

#include "base/environment.h"
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

// Modules lie beside the library that holds find_module.
bool module_built(const std::string& name) {
  Dl_info info{};
  if (!dladdr(reinterpret_cast<void*>(&comm::find_module), &info) || !info.dli_fname) return false;
  return is_there(fs::path(info.dli_fname).parent_path() / ("libfsdp_" + name + ".so"));
}

const comm::Module* cuda_module(std::string* why = nullptr) {
  return comm::gpu_present() ? comm::find_module("cuda", why) : nullptr;
}

// "13.0", as the wheel's version.py says; empty for other LibTorches.
std::string cuda_version() {
  std::ifstream file(fs::path(FSDP_LIBTORCH_DIR) / "version.py");
  static const std::regex wanted("^cuda[^=]*= '([0-9.]+)'");
  std::smatch match;
  for (std::string line; std::getline(file, line);)
    if (std::regex_search(line, match, wanted)) return match[1];
  return "";
}

// The Python wheel has cuDNN beside torch/, the C++ archive in lib/; without it nothing of CUDA
// loads, which is how ./fsdp saves 5 GB where there is no GPU.
bool cuda_flavour() {
  fs::path torch = FSDP_LIBTORCH_DIR;
  if (!is_there(torch / "lib/libtorch_cuda.so")) return false;
  for (const char* place : {"../nvidia/cudnn/lib", "lib/libcudnn.so", "lib/libcudnn.so.9"})
    if (is_there(torch / place)) return true;
  return cuda_module();
}

}  // namespace

Finding probe_fsdp() {
#ifdef __OPTIMIZE__
  return {FSDP_VERSION " in " + own_binary()};
#else
  return {FSDP_VERSION ", not optimised, in " + own_binary(), Finding::kNote,
          "this build is for debugging and slow; configure with -DCMAKE_BUILD_TYPE=Release."};
#endif
}

Finding probe_compiler() {
  return {FSDP_BUILT_WITH};
}

Finding probe_libtorch() {
  bool cuda = cuda_flavour();
  std::string version = cuda ? cuda_version() : "";
  std::string flavour = !cuda ? "CPU only" : version.empty() ? "CUDA" : "CUDA " + version;
  Finding finding{FSDP_TORCH_VERSION " (" + flavour + ") in " FSDP_LIBTORCH_DIR};
  if (!is_there(fs::path(FSDP_LIBTORCH_DIR) / "lib/libtorch_cpu.so"))
    finding.complain(Finding::kNote,
                     "the folder this was built with has gone or moved; build again.");
  if (comm::gpu_present() && !cuda)
    finding.complain(Finding::kNote,
                     "this host has a GPU that this LibTorch cannot use; ./fsdp clean removes it, "
                     "and the next call of ./fsdp fetches one with CUDA.");
  return finding;
}

Finding probe_cuda_library() {
  if (!module_built("cuda")) {
    std::string why = *FSDP_CUDA_WHY ? FSDP_CUDA_WHY : "its file has gone";
    Finding finding{"not built: " + why};
    if (comm::gpu_present())
      finding.complain(Finding::kNote,
                       "GPUs stay unused without it; install CUDA's toolkit (nvcc) and a LibTorch "
                       "with CUDA, then build again.");
    return finding;
  }
  if (!comm::gpu_present()) return {"built, not loaded: no GPU"};
  std::string why;
  const comm::Module* cuda = cuda_module(&why);
  if (!cuda)
    return {"built, cannot be loaded", Finding::kNote,
            "GPUs stay unused: " + why +
                ". The LibTorch line says whether its CUDA libraries are there."};
  int devices = cuda->devices();
  Finding finding{"loaded, can use " + std::to_string(devices) + (devices == 1 ? " GPU" : " GPUs")};
  if (devices == 0 && !comm::gpus_hidden())
    finding.complain(Finding::kProblem,
                     "there is a GPU, but CUDA cannot use it; a driver too old for CUDA " +
                         cuda_version() + " is the usual reason: compare with nvidia-smi.");
  return finding;
}

Finding probe_gpus() {
  // A driver that hangs must not hang us.
  Finished smi =
      run_program({"timeout", "20", "nvidia-smi", "--query-gpu=name,memory.total,driver_version",
                   "--format=csv,noheader"});
  if (smi.code != 0 || smi.output.empty()) {
    if (!comm::gpu_present()) return {"none"};
    std::string how = smi.code == 127   ? "there is no nvidia-smi"
                      : smi.code == 124 ? "nvidia-smi does not answer"
                                        : "nvidia-smi fails with code " + std::to_string(smi.code);
    return {
        "device files, but " + how, Finding::kProblem,
        "the driver and its tools do not fit each other, or the container was not given the GPU; "
        "run nvidia-smi by hand, reinstall the driver, or start the container with --gpus all."};
  }
  std::map<std::string, int> kinds;  // "NVIDIA H200, 143771 MiB, 570.86": how many
  std::istringstream lines(smi.output);
  for (std::string line; std::getline(lines, line);)
    if (!line.empty()) ++kinds[line];
  Finding finding;
  for (const auto& [kind, count] : kinds) {
    size_t driver = kind.rfind(", ");
    finding.found += (finding.found.empty() ? "" : "; ") + std::to_string(count) + " x " +
                     kind.substr(0, driver);
    if (driver != std::string::npos) finding.found += ", driver " + kind.substr(driver + 2);
  }
  if (comm::gpus_hidden())
    finding.complain(Finding::kNote, "CUDA_VISIBLE_DEVICES hides every GPU; unset it to use them.");
  return finding;
}

Finding probe_nccl() {
  if (const comm::Module* cuda = cuda_module()) return {cuda->describe()};
  if (backend_asked("nccl"))
    return {"not loaded", Finding::kProblem,
            "FSDP_BACKEND asks for nccl, which needs a GPU and the CUDA library; see their lines, "
            "or set FSDP_BACKEND to shm or mpi."};
  if (comm::gpu_present())
    return {"not loaded", Finding::kNote, "it comes with the CUDA library; see its line."};
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
    finding.found = module_built("mpi") ? "built, cannot be loaded" : "not built";
    finding.complain(how, (module_built("mpi") ? why + "; " : std::string()) +
                              "the mpi backend needs it: install libopenmpi-dev and openmpi-bin, "
                              "then call ./fsdp again.");
  }
  if (run_program({"mpirun", "--version"}).code == 127) {
    finding.found += ", no mpirun on PATH";
    if (mpi) finding.complain(Finding::kNote, "mpirun starts its ranks: install openmpi-bin.");
  }
  return finding;
}

Finding probe_python() {
  std::string python = environment::text("FSDP_TEST_PYTHON").value_or("python3");
  // Looks for torch without importing it, which would take seconds.
  Finished finished =
      run_program({python, "-c",
                   "import importlib.util as u, sys; sys.exit(0 if u.find_spec('torch') else 3)"});
  if (finished.code == 0) return {python + " has torch"};
  std::string found = finished.code == 3 ? python + " has no torch" : python + " cannot be run";
  return {found, Finding::kNote,
          "only comparisons need it (fsdp bench leaves PyTorch's times out): pip install torch, or "
          "name a Python that has it in FSDP_TEST_PYTHON."};
}

}  // namespace fsdp::cli
