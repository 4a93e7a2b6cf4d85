#include "comm/fake_backend.h"

#include <cstring>

#include "base/format.h"
#include "comm/core/reduce.h"
#include "fsdp/error.h"

namespace fsdp::comm {

void FakeBackend::run(const Call& call) {
  const Description& what = call.what;
  if (!call.out && !call.in) return;  // on the meta device, or empty
  // A tensor with elements has memory, unless it is on the meta device.
  auto require_both = [&] {
    if (!call.out || !call.in)
      throw Error(formatted("rank {}: {}: only the {} is on meta.", rank_, what.text(),
                            call.in ? "output" : "input"),
                  "pass tensors on one device.");
  };
  int64_t bytes = what.count * static_cast<int64_t>(c10::elementSize(what.type));
  char* out = static_cast<char*>(call.out);
  const char* in = static_cast<const char*>(call.in);
  switch (what.operation) {
    case Operation::kAllGather:
      if (bytes > 0) require_both();
      for (int r = 0; r < size_; ++r)
        if (out + r * bytes != in) std::memmove(out + r * bytes, in, bytes);
      return;
    case Operation::kReduceScatter:
      if (bytes > 0) require_both();
      [[fallthrough]];
    case Operation::kAllReduce: {
      const void* own = what.operation == Operation::kAllReduce ? out : in + rank_ * bytes;
      std::vector<const void*> everybody(size_, own);
      return comm::reduce(out, everybody, what.count, what.type, what.reduce);
    }
    case Operation::kAllToAll: {
      // Rank p sends to this one what this one sends to itself.
      int64_t element = c10::elementSize(what.type), own = 0, at = 0;
      for (int r = 0; r < rank_; ++r) own += call.in_counts[r];
      for (int64_t count : call.out_counts) {
        if (count != call.in_counts[rank_])
          throw Error(formatted("rank {}: {}: in a fake world every rank sends this one what it "
                                "sends itself, but the output splits expect something else.",
                                rank_, what.text()),
                      "use equal splits with the fake backend.");
        if (count > 0) require_both();
        std::memcpy(out + at * element, in + own * element, count * element);
        at += count;
      }
      return;
    }
    case Operation::kBroadcast:
    case Operation::kBarrier:
    case Operation::kAllocate:
    case Operation::kNone:
      return;
  }
}

}  // namespace fsdp::comm
