// The page of a benchmark with named rows: machine, versions, command, tables and every raw line.
#pragma once

#include <string>
#include <vector>

#include "bench/measured.h"

namespace fsdp::bench {

struct Page {
  std::string heading;  // "Training"
  std::string device;   // cpu or cuda
  std::string summary;  // a Markdown table above the others; empty: none
  std::string tables;   // as on a terminal, without colours
  std::vector<std::string> notes;
};

std::string page_of(const Page& page, const std::vector<RowResult>& results);

// The default file: bench/results/h200 + `suffix` + .md for an "NVIDIA H200".
std::string page_path(const std::vector<RowResult>& results, const std::string& suffix);

}  // namespace fsdp::bench
