// Resuming from the best checkpoint that is whole.
#pragma once

#include "train/begun.h"

namespace fsdp::train {

// The state after the last step that was saved; that of a new run if there is none. After a restart,
// checkpoints in memory come first. One on the disk that turns out to be damaged as it is read is
// renamed (checkpoint::set_aside), a line says so, and the one before is tried. Throws the last
// failure if none is whole. Collective.
RunState first_state(Training& training, const Begun& begun);

}  // namespace fsdp::train
