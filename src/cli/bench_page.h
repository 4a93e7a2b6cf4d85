// The page of a benchmark with named rows: machine, versions, command, tables and every raw line.
#pragma once

#include <string>
#include <vector>

#include "cli/bench_measured.h"

namespace fsdp::cli {

struct Page {
  std::string heading;  // "Training"
  std::string device;   // cpu or cuda
  std::string summary;  // a table of Markdown, for those who read one only; empty: none
  std::string tables;   // as a terminal shows them, without colours
  std::vector<std::string> notes;
};

std::string page_of(const Page& page, const std::vector<RowResult>& results);

// Where it goes when no file is named: bench/results/h200 + `suffix` + .md for an "NVIDIA H200".
std::string page_path(const std::vector<RowResult>& results, const std::string& suffix);

}  // namespace fsdp::cli
