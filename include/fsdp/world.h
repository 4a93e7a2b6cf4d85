// World: the processes that train together, and how this one joined them.
//
//   auto world = fsdp::init();            // from the environment of the launcher
//   world.comm().all_reduce(tensor);      // a communicator over everybody
//
// The launcher is read from the environment: fsdp run and torchrun (RANK, WORLD_SIZE, …), mpirun of
// OpenMPI and MPICH, srun. With none of them the world has one rank.
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

struct InitOptions {
  std::string backend = "";              // shm, mpi, nccl, fake; empty: FSDP_BACKEND, or what fits
  std::chrono::milliseconds timeout{0};  // of every wait; 0: FSDP_TIMEOUT (seconds), or 300 s
  int fake_rank = 0;                     // backend "fake" takes its world from here
  int fake_size = 0;                     //   (0: FSDP_FAKE_WORLD, or the launcher's)
};

class World {
 public:
  World() = default;

  int rank() const;
  int size() const;
  int local_rank() const;  // on this node
  int local_size() const;
  std::string backend() const;
  std::string launcher() const;  // "fsdp run", "torchrun", "OpenMPI", "MPICH", "srun", "none"
  at::Device device() const;     // cuda:(local rank modulo GPUs), or cpu
  std::chrono::milliseconds timeout() const;

  // Over all ranks.
  const Communicator& comm() const;
  // A further communicator over `ranks` (of the world, in this order). Collective over just those
  // ranks; `name` must be the same on each of them and new to the world.
  Communicator communicator(const std::vector<int>& ranks, const std::string& name) const;

  c10::intrusive_ptr<c10d::Store> store() const;
  // What is known of ranks that died or stand still ("rank 1 is gone"); empty: nothing.
  std::string trouble() const;

  // The world that this process joined last and still holds; an Error if there is none.
  static World current();
  // 1, 2, 3, …: for names that must be the same on every rank and never used twice.
  int next_number() const;
  bool operator==(const World& other) const { return state_ == other.state_; }

  explicit operator bool() const { return state_ != nullptr; }

 private:
  friend World init(InitOptions options);
  friend World fake_world(int size, int local_size);
  struct State;
  std::shared_ptr<State> state_;
};

// Joins the world. Collective; an Error names the ranks that did not come in time. The world ends
// when the last copy of the handle is gone; call it once.
World init(InitOptions options = {});

// Rank 0 of a world with nobody else in it, beside any that this process has joined: what plans are
// made in. `local_size`: ranks a node; 0: all of them.
World fake_world(int size, int local_size = 0);

}  // namespace fsdp
