/// @file
/// The processes that train together, and how this one joins them.
///
///     auto world = fsdp::init();            // reads the launcher's environment
///     world.comm().all_reduce(tensor);      // a communicator over all ranks
///
/// Known launchers: fsdp run and torchrun (RANK, WORLD_SIZE, …), mpirun of OpenMPI and MPICH, srun.
/// Without one the world has a single rank.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/communicator.h"

namespace c10d {
class Store;
}

namespace fsdp {

class World;
namespace comm {
int next_number(const World& world);  ///< Internal.
}

/// Options of init().
struct InitOptions {
  /// "shm", "mpi", "nccl" or "fake". Empty: FSDP_BACKEND, else the one that fits.
  std::string backend = "";
  /// Limit of every wait for other ranks. 0: FSDP_TIMEOUT (in seconds), else 300 s.
  std::chrono::milliseconds timeout{0};
  int fake_rank = 0;  ///< This process's rank with backend "fake", if fake_size is set.
  int fake_size = 0;  ///< World size with backend "fake". 0: FSDP_FAKE_WORLD, or the launcher's.
};

/// The processes that train together. A shared handle: copies refer to the same world.
class World {
 public:
  /// A handle to no world.
  World() = default;

  int rank() const;              ///< This process's rank.
  int size() const;              ///< Number of ranks.
  int local_rank() const;        ///< Rank on this node.
  int local_size() const;        ///< Number of ranks on this node.
  std::string backend() const;   ///< "shm", "mpi", "nccl" or "fake".
  std::string launcher() const;  ///< "fsdp run", "torchrun", "OpenMPI", "MPICH", "srun" or "none".
  at::Device device() const;     ///< With nccl cuda:(local rank modulo GPUs), else cpu.
  std::chrono::milliseconds timeout() const;  ///< Limit of every wait for other ranks.

  /// The communicator over all ranks.
  const Communicator& comm() const;
  /// Makes a communicator over `ranks` of the world, numbered in this order. `name` must be the
  /// same on each of them and new to the world. Collective over these ranks only.
  Communicator communicator(const std::vector<int>& ranks, const std::string& name) const;

  /// The key-value store of the rendezvous.
  c10::intrusive_ptr<c10d::Store> store() const;
  /// What is known about ranks that died or hang ("rank 1 is gone"). Empty: nothing.
  std::string trouble() const;

  /// The world that this process joined and still holds. Throws Error if there is none.
  static World current();
  /// Whether both refer to the same world.
  bool operator==(const World& other) const { return state_ == other.state_; }

  /// Whether it refers to a world.
  explicit operator bool() const { return state_ != nullptr; }

 private:
  friend World init(InitOptions options);
  friend World fake_world(int size, int local_size);
  friend int comm::next_number(const World& world);
  struct State;
  std::shared_ptr<State> state_;
};

/// Joins the world. Call it once: the world ends when the last copy of the handle is destroyed.
/// Throws Error that names the ranks that didn't come in time. Collective.
World init(InitOptions options = {});

/// Rank 0 of a world without other processes, next to any world that this process has joined; plans
/// are made in one. `local_size`: ranks per node; 0: all of them.
World fake_world(int size, int local_size = 0);

}  // namespace fsdp
