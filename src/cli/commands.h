// The commands of the fsdp binary, one file each. A command declares its flags on `app`; its
// callback sets `action`, which returns the exit code.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace fsdp::cli {

// Set by the chosen command's callback while parsing; run once parsing has succeeded.
using Action = std::function<int()>;

void add_train(CLI::App& app, Action& action);
void add_generate(CLI::App& app, Action& action);
void add_tokenize(CLI::App& app, Action& action);
void add_ckpt(CLI::App& app, Action& action);
void add_report(CLI::App& app, Action& action);
void add_plan(CLI::App& app, Action& action);
void add_explain(CLI::App& app, Action& action);
void add_run(CLI::App& app, Action& action);
void add_hang(CLI::App& app, Action& action);
void add_doctor(CLI::App& app, Action& action);

// bench is a separate program: fsdp only lists it, and replaces itself with it.
void list_bench(CLI::App& app);
int exec_bench(char** arguments);  // null-terminated, after "bench"; returns only on failure

}  // namespace fsdp::cli
