// One rank of the tests that need real processes. The first argument selects the scenario; the
// result, "ok DIGEST" or the error's text, goes to the file rank-N in the folder FSDP_TEST_DIR.
//   collectives          every operation and type at a range of sizes, checked
//   fault KIND VICTIM    a few good operations; then rank VICTIM is killed, stopped, throws or
//                        makes a different call (kill, stop, throw, mismatch), or does something
//                        else that is named in wrong_turn()
//   hold MIB             maps MIB of shared memory and waits to be killed
//   store                four threads of each rank use the store, until the file "go" appears
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <signal.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <fstream>
#include <iostream>
#include <numeric>
#include <thread>

#include "fsdp/fsdp.h"

namespace {

using fsdp::Communicator;
using fsdp::ReduceOp;
using fsdp::World;

std::string g_dir;

void leave(int rank, const std::string& text) {
  std::string path = g_dir + "/rank-" + std::to_string(rank);
  std::ofstream(path + ".part") << text;
  std::rename((path + ".part").c_str(), path.c_str());
}

void require(bool good, const std::string& what) {
  if (!good) throw std::runtime_error("wrong result: " + what);
}

// Small whole numbers: exact in every type, so that expectations need no tolerance. They repeat
// after five, so that millions are made quickly.
at::Tensor values(int rank, int64_t count, at::ScalarType type, int salt) {
  auto five = (at::arange(5, at::kLong) * 7 + rank * 3 + salt).remainder(5) - 1;
  return five.to(type).repeat({(count + 4) / 5}).narrow(0, 0, count);
}

class Digest {  // FNV-1a over all results, to compare backends bit for bit
 public:
  void add(const at::Tensor& tensor) {
    at::Tensor bytes = tensor.cpu().contiguous();
    auto* data = static_cast<const unsigned char*>(bytes.data_ptr());
    for (size_t i = 0; i < bytes.nbytes(); ++i) hash_ = (hash_ ^ data[i]) * 1099511628211ull;
  }
  std::string text() const { return std::to_string(hash_); }

 private:
  uint64_t hash_ = 1469598103934665603ull;
};

void check_type(const World& world, at::ScalarType type, int64_t count, bool async,
                Digest& digest) {
  const Communicator& comm = world.comm();
  int rank = comm.rank(), size = comm.size();
  std::string what = std::string(c10::toString(type)) + " x " + std::to_string(count);
  auto on_device = [&](const at::Tensor& tensor) { return tensor.to(world.device()); };
  fsdp::CallOptions options{.async = async, .label = "a test"};

  at::Tensor full = on_device(at::zeros({count * size}, type));
  comm.all_gather(full, on_device(values(rank, count, type, 0)), options).wait();
  for (int r = 0; r < size; ++r)
    require(full.narrow(0, r * count, count).cpu().equal(values(r, count, type, 0)),
            "all_gather of " + what);

  auto expected = [&](int64_t n, ReduceOp op) {
    at::Tensor sum = values(0, n, type, 1).to(at::kDouble);
    for (int r = 1; r < size; ++r) {
      at::Tensor next = values(r, n, type, 1).to(at::kDouble);
      sum = op == ReduceOp::MAX ? at::maximum(sum, next) : sum + next;
    }
    return sum.to(type);
  };
  for (ReduceOp op : {ReduceOp::SUM, ReduceOp::MAX}) {
    at::Tensor out = on_device(at::zeros({count}, type));
    comm.reduce_scatter(out, on_device(values(rank, count * size, type, 1)), op, options).wait();
    require(out.cpu().equal(expected(count * size, op).narrow(0, rank * count, count)),
            "reduce_scatter of " + what);
    at::Tensor all = on_device(values(rank, count, type, 1));
    comm.all_reduce(all, op, options).wait();
    require(all.cpu().equal(expected(count, op)), "all_reduce of " + what);
  }
  at::Tensor sent = on_device(values(rank, count, type, 2));
  comm.broadcast(sent, size - 1, options).wait();
  require(sent.cpu().equal(values(size - 1, count, type, 2)), "broadcast of " + what);

  at::Tensor out = on_device(at::zeros({count * size}, type));
  comm.all_to_all(out, on_device(values(rank, count * size, type, 3)), {}, {}, options).wait();
  for (int r = 0; r < size; ++r)
    require(out.narrow(0, r * count, count)
                .cpu()
                .equal(values(r, count * size, type, 3).narrow(0, rank * count, count)),
            "all_to_all of " + what);

  // Values that need rounding: all our backends must give the same bits.
  if (at::isFloatingType(type)) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(rank + 1);
    at::Tensor rough = at::randn({count * size}, generator, at::kFloat).to(type);
    for (ReduceOp op : {ReduceOp::SUM, ReduceOp::AVG}) {
      at::Tensor part = on_device(at::zeros({count}, type));
      comm.reduce_scatter(part, on_device(rough), op, options).wait();
      at::Tensor all = on_device(rough.clone());
      comm.all_reduce(all, op, options).wait();
      require(
          all.cpu().narrow(0, rank * count, count).equal(part.cpu()) || world.backend() == "nccl",
          "reduce_scatter and all_reduce differ on " + what);
      digest.add(all);
    }
  }
}

void check_buffers(const World& world) {
  const Communicator& comm = world.comm();
  int rank = comm.rank(), size = comm.size();
  int64_t part = 1001;
  at::Tensor full = comm.gather_buffer(part * size, at::kFloat, world.device());
  at::Tensor gradients = comm.reduce_buffer(part * size, at::kFloat, world.device());
  for (int step = 0; step < 3; ++step) {
    comm.barrier();  // the others have read the previous step's values
    at::Tensor own = full.narrow(0, rank * part, part);
    own.fill_(rank + step);
    comm.all_gather(full, own);
    for (int r = 0; r < size; ++r)
      require(full.narrow(0, r * part, part).eq(r + step).all().item<bool>(), "gather_buffer");
    gradients.fill_(rank + 1);
    at::Tensor sum = at::zeros({part}, full.options());
    comm.reduce_scatter(sum, gradients);
    require(sum.eq(size * (size + 1) / 2).all().item<bool>(), "reduce_buffer");
    comm.all_reduce(gradients);
    require(gradients.eq(size * (size + 1) / 2).all().item<bool>(), "all_reduce of reduce_buffer");
    // Reduced in place, then gathered in place, in each rank's own buffer.
    at::Tensor rows = gradients.view({size, part});
    for (int r = 0; r < size; ++r) rows[r].fill_((rank + 1) * (r + 1));
    comm.reduce_scatter(rows[rank], gradients);
    comm.all_gather(gradients, rows[rank]);
    for (int r = 0; r < size; ++r)
      require(rows[r].eq((r + 1) * size * (size + 1) / 2).all().item<bool>(),
              "all_gather in place in a reduce_buffer");
  }
  // Uneven all_to_all: rank r sends r + 1 rows to every rank.
  std::vector<int64_t> in_splits(size, rank + 1), out_splits;
  for (int r = 0; r < size; ++r) out_splits.push_back(r + 1);
  at::Tensor in = at::full({size * (rank + 1), 2}, rank, full.options());
  at::Tensor out = at::zeros({size * (size + 1) / 2, 2}, full.options());
  comm.all_to_all(out, in, out_splits, in_splits);
  int64_t row = 0;
  for (int r = 0; r < size; row += r + 1, ++r)
    require(out.narrow(0, row, r + 1).eq(r).all().item<bool>(), "uneven all_to_all");
}

// An asynchronous call continues while this thread does something else, without a wait().
void check_overlap(const World& world) {
  at::Tensor x = at::ones({200000}, at::TensorOptions().device(world.device()));
  fsdp::Work work = world.comm().all_reduce(x, ReduceOp::SUM, {.async = true});
  for (int i = 0; i < 60000 && !work.done(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  require(work.done(), "an asynchronous all_reduce that nobody waits for");
  require(x.eq(world.size()).all().item<bool>(), "an asynchronous all_reduce");
}

// On a GPU a call is ordered on the current stream, whichever it is.
void check_stream(const World& world) {
  if (world.device().is_cpu()) return;
  c10::impl::VirtualGuardImpl gpu(world.device().type());
  c10::StreamGuard guard(gpu.getStreamFromGlobalPool(world.device(), false));
  at::Tensor slow = at::ones({2048, 2048}, at::TensorOptions().device(world.device()));
  for (int i = 0; i < 20; ++i) slow = slow.mm(slow).clamp(0, 1);
  at::Tensor x = slow.mul(world.rank() + 1);
  world.comm().all_reduce(x);
  require(x.mul(2).cpu().eq(world.size() * (world.size() + 1)).all().item<bool>(),
          "an all_reduce on a stream of its own");
}

void check_mesh(const World& world) {
  if (world.size() % 2) return;
  fsdp::DeviceMesh mesh(world, {{"replicate", 2}, {"shard", world.size() / 2}});
  at::Tensor t = at::full({3}, world.rank(), at::TensorOptions().device(world.device()));
  mesh.comm("shard", "gather").all_reduce(t);
  int half = world.size() / 2, first = mesh.coordinate("replicate") * half, sum = 0;
  for (int r = first; r < first + half; ++r) sum += r;
  require(t.eq(sum).all().item<bool>(), "a mesh's shard dimension");
  at::Tensor u = at::full({3}, world.rank(), t.options());
  mesh.comm("replicate").all_reduce(u, ReduceOp::MAX);
  require(u.eq(half + mesh.coordinate("shard")).all().item<bool>(), "a mesh's replicate dimension");
}

std::string collectives(const World& world) {
  Digest digest;
  bool nccl = world.backend() == "nccl";
  for (bool async : {false, true}) {
    for (at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kByte,
                                at::kChar, at::kShort, at::kInt, at::kLong}) {
      if (nccl && type == at::kShort) continue;  // NCCL has no 16-bit integer
      for (int64_t count : {1, 3, 1000}) check_type(world, type, count, async, digest);
    }
    check_type(world, at::kFloat, 300001, async, digest);
    check_type(world, at::kBFloat16, 1100003, async, digest);
  }
  check_buffers(world);
  check_overlap(world);
  check_stream(world);
  check_mesh(world);
  world.comm().barrier();
  return digest.text();
}

// Where rank `victim` leaves the others' path. True: it has nothing more to do.
bool wrong_turn(const World& world, const std::string& kind, const at::Tensor& data) {
  const Communicator& comm = world.comm();
  if (kind == "kill") raise(SIGKILL);
  if (kind == "stop") raise(SIGSTOP);
  if (kind == "throw") throw std::runtime_error("a planned exception");
  if (kind == "leave") _exit(3);
  if (kind == "crash") *reinterpret_cast<volatile int*>(8) = 1;
  if (kind == "terminate")
    std::thread([] { throw std::runtime_error("an exception on a thread of its own"); }).join();
  while (kind == "elsewhere") pause();
  if (kind == "mismatch") {
    at::Tensor full = at::zeros({500 * comm.size()}, data.options());
    comm.all_gather(full, data.narrow(0, 0, 500));
    comm.barrier();
    return true;
  }
  return false;
}

void fault(const World& world, const std::string& kind, int victim) {
  const Communicator& comm = world.comm();
  at::Tensor data = at::ones({1000}, at::TensorOptions().device(world.device()));
  for (int i = 0; i < 3; ++i) comm.all_reduce(data, ReduceOp::MAX);
  comm.barrier();
  // One rank may be past it while others are still in it, and it must not be the call that fails.
  const char* past = "past the barrier";
  world.store()->add(past, 1);
  while (world.rank() == victim && world.store()->add(past, 0) < world.size())
    std::this_thread::yield();
  std::ofstream(g_dir + "/ready-" + std::to_string(world.rank()));
  if (kind == "order") {
    std::vector<int> all(comm.size());
    std::iota(all.begin(), all.end(), 0);
    Communicator a = world.communicator(all, "a"), b = world.communicator(all, "b");
    const bool turned = world.rank() == victim;
    (turned ? b : a).all_reduce(data);
    (turned ? a : b).all_reduce(data);
    return;
  }
  if (world.rank() == victim && wrong_turn(world, kind, data)) return;
  comm.all_reduce(data, ReduceOp::SUM, {.label = "unit layers.7"});
  comm.barrier();
}

// Each thread passes numbers on to the same thread of the next rank, and all count their calls.
std::string use_store(const World& world) {
  const auto store = world.store();
  const std::string self = std::to_string(world.rank()),
                    before = std::to_string((world.rank() + world.size() - 1) % world.size());
  std::vector<std::exception_ptr> failures(4);
  std::vector<std::thread> threads;
  int rounds = 0;
  const auto pass_on = [&](int thread) {
    const std::string end = "/" + std::to_string(thread) + "/";
    for (int i = 0; i < 20; ++i) {
      const std::string key = end + std::to_string(rounds) + "/" + std::to_string(i);
      store->set("from/" + self + key, key);
      require(store->get_to_str("from/" + before + key) == key, "a key of the store");
      require(store->deleteKey("from/" + before + key), "deleting a key of the store");
      store->add("calls", 1);
    }
  };
  at::Tensor more = at::ones({1}, at::kLong);
  for (; more.item<int64_t>() > 0; ++rounds) {
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        try {
          pass_on(t);
        } catch (...) {
          failures[t] = std::current_exception();
        }
      });
    for (auto& thread : threads) thread.join();
    threads.clear();
    for (const auto& failure : failures)
      if (failure) std::rethrow_exception(failure);
    if (rounds == 0) leave(world.rank() + world.size(), "ready");
    more.fill_(access((g_dir + "/go").c_str(), F_OK) == 0 ? 0 : 1);
    world.comm().all_reduce(more, ReduceOp::MAX);
  }
  world.comm().barrier();
  require(store->add("calls", 0) == int64_t{80} * rounds * world.size(), "the number of calls");
  return "ok";
}

int run(int argc, char** argv) {
  std::string scenario = argc > 1 ? argv[1] : "";
  World world = fsdp::init();
  if (scenario == "collectives") {
    leave(world.rank(), "ok " + collectives(world) + " " + world.launcher());
  } else if (scenario == "fault") {
    try {
      fault(world, argv[2], std::stoi(argv[3]));
      leave(world.rank(), "ok");
    } catch (const fsdp::Error& error) {
      leave(world.rank(), error.what());
      throw;
    }
  } else if (scenario == "store") {
    leave(world.rank(), use_store(world));
  } else if (scenario == "hold") {
    at::Tensor held = world.comm().gather_buffer(std::stoll(argv[2]) << 20, at::kByte, at::kCPU);
    held.fill_(1);
    world.comm().barrier();
    leave(world.rank(), "ok");
    for (;;) pause();
  } else {
    std::cerr << "rank_program: no such scenario\n";
    return 2;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  g_dir = std::getenv("FSDP_TEST_DIR") ? std::getenv("FSDP_TEST_DIR") : ".";
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "rank_program: " << error.what() << std::endl;
    return 3;
  }
}
