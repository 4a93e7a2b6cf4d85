// fsdp explain in two halves: a rank takes a step and records what happened; the command explains
// what the ranks recorded. The record is JSON, which --json prints.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "cli/ranks.h"
#include "report/page.h"

namespace fsdp::cli {

struct ExplainOptions {
  int ranks = 2;
  std::string strategy = "FULL_SHARD";
  int prefetch = 1;
  std::string model = "mlp";  // or llama-tiny
  int blocks = 5;
  bool shared = false;  // gathers through shared host memory
  bool brief = false, json = false;
  std::string html;  // file for a page; "": none
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(ExplainOptions, strategy, prefetch, model, blocks,
                                                shared)

// Takes three steps with the other ranks of this process's world. The account has everything that
// is explained: units and their layout, memory, events with microseconds and bytes, traffic.
Json account_of_a_step(const ExplainOptions& options);

// Prints chapter 1: which rank keeps which part of which parameter.
void tell_layout(const std::vector<Json>& accounts, bool brief, std::ostream& out);

// What a phase of the step does ("forward", "backward", "step"), for newcomers.
std::string introduction_of(const Json& account, const std::string& phase);
// Why each event of a step happened, in their order.
std::vector<std::string> reasons_of(const Json& account);

// The step as a picture: shards, the ring, when each unit was gathered, memory.
report::Page explain_page(const std::vector<Json>& accounts);

// Prints all chapters. `accounts`: one per rank, in rank order.
void tell(const std::vector<Json>& accounts, bool brief, std::ostream& out);

}  // namespace fsdp::cli
