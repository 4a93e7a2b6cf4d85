// What a backward that threw leaves behind.
#pragma once

namespace fsdp::shard {

// After an exception in backward: autograd keeps what it had still to run on this thread until the
// next backward, and with it parameters, their model and the world. Drops it all.
void drop_interrupted_backward();

}  // namespace fsdp::shard
