// The commands of the fsdp binary, one file each. A command declares its flags on the app it is
// given; what it does when chosen it leaves as a callback that returns the exit code.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace fsdp::cli {

// Set by the chosen command's callback while parsing; main runs it after parsing succeeded.
using Action = std::function<int()>;

void add_train(CLI::App& app, Action& action);
void add_generate(CLI::App& app, Action& action);
void add_tokenize(CLI::App& app, Action& action);
void add_ckpt(CLI::App& app, Action& action);
void add_plan(CLI::App& app, Action& action);
void add_explain(CLI::App& app, Action& action);
void add_run(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_doctor(CLI::App& app, Action& action);

}  // namespace fsdp::cli
