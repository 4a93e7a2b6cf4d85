// What `fsdp plan` prints beside a plan itself, and the worlds that it is asked for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/plan.h"

namespace fsdp::cli {

// "8", "8,12,16", or "8..1024": doubled until the last, which is always among them. They come out
// in the order given; anything else is an Error.
std::vector<int> worlds_of(const std::string& text);

// One row a setting, each with its largest micro-batch.
void print_choices(const std::vector<PlanChoice>& choices, int64_t tokens_per_sample, bool json);

// One row a world: how much fits there, and what is the fastest.
void print_worlds(const std::vector<WorldChoice>& worlds, int64_t tokens_per_sample, bool json);

// The kinds of memory, and what comes of them, for programs.
void print_kinds(const Plan& plan);
void print_verdict(const Plan& plan, int64_t tokens_per_sample);

// `host_lacks`: GPUs would do, with what is offloaded.
std::string nothing_fits(bool host_lacks);

std::string lower(std::string text);

}  // namespace fsdp::cli
