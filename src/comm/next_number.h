// Numbers for names that must be unique in a world.
#pragma once

namespace fsdp {
class World;
}

namespace fsdp::comm {

// 1, 2, 3, …: the same on every rank if all ranks call it in the same order.
int next_number(const World& world);

}  // namespace fsdp::comm
