#include "launch/options.h"

#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <optional>

#include "base/format.h"
#include "fsdp/error.h"
#include "launch/environment.h"

namespace fsdp::launch {
namespace {

std::optional<int> whole_number(const std::string& text) {
  int number = 0;
  auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (problem != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

std::string quoted(const std::string& text) {
  return "\"" + text + "\"";
}

}  // namespace

int parse_nproc(const std::string& text) {
  if (text == "cpu") return available_cores();
  if (text == "gpu" || text == "auto") {
    int gpus = visible_gpus();
    if (gpus == 0 && text == "gpu") {
      throw Error("-n gpu: no GPU is visible on this machine.",
                  "check nvidia-smi and CUDA_VISIBLE_DEVICES, or pass a number: -n 2.");
    }
    return gpus > 0 ? gpus : available_cores();
  }
  auto ranks = whole_number(text);
  if (!ranks || *ranks < 1) {
    throw Error(formatted("-n {} isn't a number of ranks.", quoted(text)),
                "pass a whole number of at least 1, or auto, gpu or cpu.");
  }
  if (*ranks > kMostRanksPerNode) {
    throw Error(formatted("-n {} is too many ranks for one machine.", text),
                formatted("at most {} per node; -n auto fits the machine.", kMostRanksPerNode));
  }
  return *ranks;
}

NodeCount parse_nnodes(const std::string& text) {
  const auto colon = text.find(':');
  const auto least = whole_number(text.substr(0, colon));
  const auto most = colon == std::string::npos ? least : whole_number(text.substr(colon + 1));
  if (!least || !most || *least < 1 || *most < *least || *most > 65536) {
    throw Error(formatted("--nnodes {} isn't a number of nodes.", quoted(text)),
                "pass a whole number of at least 1, or two as in 3:4: at least 3, at most 4.");
  }
  return {*least, *most};
}

int parse_port(const std::string& text, const std::string& flag) {
  auto port = whole_number(text);
  if (!port || *port < 1 || *port > 65535) {
    throw Error(formatted("{}: {} isn't a port.", flag, quoted(text)),
                "pass a number from 1 to 65535.");
  }
  return *port;
}

Endpoint parse_endpoint(const std::string& text, const std::string& flag) {
  Endpoint endpoint;
  std::string rest;
  if (!text.empty() && text.front() == '[') {
    auto end = text.find(']');
    if (end != std::string::npos) {
      endpoint.host = text.substr(1, end - 1);
      rest = text.substr(end + 1);
    }
  } else {
    auto colon = text.find(':');
    if (colon != std::string::npos && text.find(':', colon + 1) != std::string::npos) {
      throw Error(formatted("{} {} has more than one colon.", flag, quoted(text)),
                  "write an IPv6 address in brackets: [::1]:29500.");
    }
    endpoint.host = text.substr(0, colon);
    if (colon != std::string::npos) rest = text.substr(colon);
  }
  if (endpoint.host.empty() || (!rest.empty() && rest.front() != ':')) {
    throw Error(formatted("{} {} isn't HOST:PORT.", flag, quoted(text)),
                "pass a host and a port, for example node0:29500.");
  }
  if (!rest.empty()) endpoint.port = parse_port(rest.substr(1), flag);
  return endpoint;
}

std::vector<std::string> command_for(std::vector<std::string> program, bool module,
                                     bool no_python) {
  if (program.empty() || program.front().empty()) {
    throw Error("no program to run.", "put it after the flags: fsdp run -n 2 ./train --steps 100");
  }
  const std::string& first = program.front();
  bool script = first.size() > 3 && first.ends_with(".py") && access(first.c_str(), X_OK) != 0;
  if (module && no_python) {
    throw Error("-m and --no-python contradict each other.",
                "leave out --no-python: Python runs -m MODULE.");
  }
  if (!module && (no_python || !script)) return program;
  const char* python = std::getenv("PYTHON_EXEC");
  std::vector<std::string> prefix = {python && *python ? python : "python3", "-u"};
  if (module) prefix.push_back("-m");
  program.insert(program.begin(), prefix.begin(), prefix.end());
  return program;
}

void complete(Options& options) {
  const bool spare = options.node_rank == kSpareNode && options.nnodes > 1;
  if (!spare && (options.node_rank < 0 || options.node_rank >= options.nnodes)) {
    throw Error(formatted("--node-rank {} is out of range for --nnodes {}.", options.node_rank,
                          options.nnodes),
                options.nnodes == 1
                    ? "pass --nnodes too."
                    : formatted("nodes are numbered from 0 to {}; start each one once.",
                                options.nnodes - 1));
  }
  if (options.nnodes == 1) return;
  if (options.master_host.empty()) {
    throw Error(formatted("--nnodes {} needs --master.", options.nnodes),
                "pass node 0's address on every node: --master HOST:PORT.");
  }
  if (options.master_port == 0) options.master_port = kDefaultMasterPort;
  if (options.control_port == 0) options.control_port = options.master_port + 1;
  if (options.control_port > 65535) {
    throw Error("the control port would be 65536, one above the master port.",
                "pass a lower master port, or a --control-port.");
  }
  if (options.control_port == options.master_port) {
    throw Error(formatted("--control-port {} is the master port, where rank 0 listens.",
                          options.control_port),
                "leave out --control-port; the default is the master port + 1.");
  }
}

}  // namespace fsdp::launch
