// Messages between launchers, and how they look on the wire: JSON objects, each with its "type".
//   to node 0:    Hello, FailureNotice, KillOrder, EndNotice, Beat, ReplaceRequest, Reached
//   from node 0:  Plan, Refusal, FailureNotice, KillOrder, Verdict, Beat, LetGo, Reached
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

inline constexpr int kMessageVersion = 4;

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

// While dead ranks are replaced, all nodes are at the same stage.
enum class Stage {
  kNone,
  kLettingGo,  // the other ranks let go of the world; ends when all of them wait
  kJoining,    // all ranks join the next one; ends when they have
};

struct ReplaceRequest {  // a rank died that can be replaced while the others stay
  int restart = 0;       // that the node is at
  Failure failure;
};

struct LetGo {  // the ranks that live let go of the world; those that died are started again
  int restart = 0, master_port = 0;  // of the world that all will join
  Failure failure;
};

struct Reached {  // to node 0: this node is at the end of the stage; from it: all nodes are
  int restart = 0;
  Stage stage = Stage::kLettingGo;
};

// Of a Plan, `master_host` isn't sent: every node has its own.
using Message = std::variant<Hello, Plan, Refusal, FailureNotice, KillOrder, EndNotice, Verdict,
                             Beat, ReplaceRequest, LetGo, Reached>;

std::string encode(const Message& message);  // one line, without its end
// Throws an Error that names the field unless the line is exactly a message.
Message decode(std::string_view line);

}  // namespace fsdp::launch
