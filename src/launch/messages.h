// Messages between launchers, and how they look on the wire: JSON objects, each with its "type".
//   to node 0:    Hello, FailureNotice, KillOrder, EndNotice, Beat
//   from node 0:  Plan, Refusal, FailureNotice, KillOrder, Verdict, Beat
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "launch/environment.h"
#include "launch/failure.h"
#include "launch/options.h"

namespace fsdp::launch {

inline constexpr int kMessageVersion = 3;

struct Hello {  // a node joins
  int version = kMessageVersion;
  int nnodes = 1;
  int node = 0;  // kSpareNode: whichever is lost
  int nproc = 1;
  int restart = 0;  // the number of its launcher's next start; 0: it is new
};

struct Refusal {  // the nodes don't fit together
  std::string message, hint;
};

struct FailureNotice {
  Failure failure;
};

struct Beat {};  // a sign of life

struct KillOrder {};  // kill the ranks at once: a second signal arrived

struct EndNotice {  // all ranks of a node have exited
  std::optional<std::vector<std::string>>
      last_lines;  // of the rank that failed first, if it is there
};

struct Verdict {  // what follows when all nodes have ended
  bool restart = false;
  std::optional<Failure> failure;  // nullopt: every rank of every node exited with 0
};

// Of a Plan, `master_host` isn't sent: every node has its own.
using Message = std::variant<Hello, Plan, Refusal, FailureNotice, KillOrder, EndNotice, Verdict,
                             Beat>;

std::string encode(const Message& message);  // one line, without its end
// Throws an Error that names the field unless the line is exactly a message.
Message decode(std::string_view line);

}  // namespace fsdp::launch
