// fsdp explain in two halves: a rank that takes a step and writes down what happened, and the
// telling of what the ranks wrote. Between them lies JSON, which is what --json prints.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "cli/bench_ranks.h"

namespace fsdp::cli {

struct ExplainOptions {
  int ranks = 2;
  std::string strategy = "FULL_SHARD";
  int prefetch = 1;
  std::string model = "mlp";  // or llama-tiny
  int blocks = 5;
  bool shared = false;  // gathers through shared host memory
  bool brief = false, json = false, worker = false;
};

// Takes a step with the other ranks of this process's world. The account has everything that the
// telling says: units and their layout, memory, events with microseconds and bytes, traffic.
Json account_of_a_step(const ExplainOptions& options);

// Chapter 1 of the telling: which rank keeps which part of which parameter.
void tell_layout(const std::vector<Json>& accounts, bool brief, std::ostream& out);

// Tells the accounts, one a rank in the order of ranks, to people.
void tell(const std::vector<Json>& accounts, bool brief, std::ostream& out);

}  // namespace fsdp::cli
