// save and save_async: every rank writes its shards into a file of its own. Rank 0 also writes the
// replicated tensors and the metadata, and publishes the checkpoint.
#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <thread>

#include "base/format.h"
#include "base/log.h"
#include "base/mutex.h"
#include "checkpoint/files.h"
#include "checkpoint/folder.h"
#include "checkpoint/manifest.h"
#include "checkpoint/messages.h"
#include "checkpoint/same_model.h"
#include "checkpoint/save_plan.h"
#include "checkpoint/staging.h"
#include "checkpoint/together.h"
#include "comm/next_number.h"
#include "fsdp/checkpoint.h"
#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/out_of_memory.h"
#include "shard/background.h"
#include "shard/contents.h"

namespace fsdp::checkpoint {

// --- one save ---

namespace {

using Clock = std::chrono::steady_clock;
using Path = std::filesystem::path;

std::string file_of(int rank) {
  return formatted("__{}_0.distcp", rank);
}

// Passes on the bytes of a chunk. Chunks are read in the plan's order.
using ReadChunk = std::function<void(const PlannedChunk& chunk,
                                     const std::function<void(const void*, size_t)>& use)>;

SaveReport write_file(const SavePlan& plan, const ReadChunk& read, const Path& folder, int rank) {
  SaveReport report;
  files::Output out(folder / file_of(rank), plan.bytes());
  for (const auto& value : plan.values)
    report.metadata.add_value(value.path, write_value(out, value.put));
  for (const auto& chunk : plan.chunks) {
    const ItemPlace place =
        write_tensor(out, chunk.part.memory, [&](const auto& use) { read(chunk, use); });
    for (const auto& name : chunk.paths)
      report.metadata.add_chunk(name, chunk.part.memory.scalar_type(), chunk.sizes,
                                {chunk.part.rectangle, place});
  }
  report.manifest.files[file_of(rank)] = out.close();
  return report;
}

void delete_old_ones(const Path& folder, int64_t keep) {
  try {
    keep_last(folder, keep);
  } catch (const std::exception& problem) {  // one checkpoint too many isn't an error
    log::warn(formatted("an old checkpoint could not be removed: {}", problem.what()));
  }
}

struct Save {
  World world;
  Path name;  // of the checkpoint
  int64_t keep = 0;

  std::string label() const { return "the checkpoint " + name.filename().string(); }

  void begin() const {
    together(world, label() + ": begin", [&] {
      if (world.rank() == 0) begin_partial(name);
    });
  }

  void finish(const SavePlan& plan, const ReadChunk& read, const Exchange& exchange) const {
    const Path partial = partial_of(name);
    const auto write = [&] {
      const SaveReport report = write_file(plan, read, partial, world.rank());
      files::sync_directory(partial);
      return report.encode();
    };
    const auto publish = [&](const std::vector<std::string>& reports) {
      SaveReport all;
      for (size_t rank = 0; rank < reports.size(); ++rank)
        all.add(SaveReport::decode(reports[rank], formatted("rank {}", rank)));
      all.manifest.files[kMetadataName] =
          files::write_whole(partial / kMetadataName, encode(all.metadata));
      write_manifest(partial, all.manifest);
      publish_partial(name);
    };
    try {
      commit(world, exchange, label(), write, publish);
    } catch (...) {
      if (world.rank() == 0) drop_partial(name);
      throw;
    }
    if (keep > 0 && world.rank() == 0) delete_old_ones(name.parent_path(), keep);
  }

  // Writes the tensors as they are now.
  void finish_now(const SavePlan& plan) const {
    ChunkReader reader(plan);
    const ReadChunk read = [&](const PlannedChunk& chunk, const auto& use) {
      for_each_piece(reader.read(chunk), use);
    };
    finish(plan, read, by_collectives(world));
  }
};

}  // namespace

// --- in the background ---

struct AsyncSave::Job {
  std::chrono::nanoseconds blocked{};
  bool skipped = false;
  std::shared_ptr<Staging> staging;  // null: there was no copy
  Clock::time_point begun = Clock::now();
  Mutex mutex;
  Condition ended;
  bool done FSDP_GUARDED_BY(mutex) = false;
  bool told FSDP_GUARDED_BY(mutex) = false;  // the failure was reported to the caller
  std::exception_ptr error FSDP_GUARDED_BY(mutex);
  Clock::time_point end_time FSDP_GUARDED_BY(mutex);

  void end(std::exception_ptr why) {
    Lock lock(mutex);
    error = std::move(why);
    done = true;
    end_time = Clock::now();
    ended.notify_all();
  }
  bool is_done() {
    Lock lock(mutex);
    return done;
  }
  bool untold_failure() {
    Lock lock(mutex);
    return error && !told;
  }
  SaveProgress progress() {
    Lock lock(mutex);
    if (!staging) return {};
    const auto time = (done ? end_time : Clock::now()) - begun;
    return {staging->bytes(), staging->read_so_far(), std::chrono::duration<double>(time).count()};
  }
  void tell() {  // throws the error
    Lock lock(mutex);
    told = true;
    if (error) std::rethrow_exception(error);
  }
  void wait() {
    {
      Lock lock(mutex);
      ended.wait(lock, [&]() FSDP_REQUIRES(mutex) { return done; });
    }
    tell();
  }
};

bool AsyncSave::done() const {
  return !job_ || job_->is_done();
}

void AsyncSave::wait() const {
  if (job_) job_->wait();
}

std::chrono::nanoseconds AsyncSave::blocked() const {
  if (!job_) return {};
  return job_->blocked + (job_->staging ? job_->staging->held() : std::chrono::nanoseconds{});
}

bool AsyncSave::skipped() const {
  return job_ && job_->skipped;
}

SaveProgress AsyncSave::progress() const {
  return job_ ? job_->progress() : SaveProgress{};
}

namespace {

// Of a save in the background. That of all ranks together is the largest of theirs.
enum class SaveStage { kSaved, kFailed, kWriting };

// The saves of one model, one after the other.
class Saver : public shard::Background {
 public:
  Saver(World world, at::Device device) : world_(std::move(world)), device_(device) {}
  ~Saver() override {
    if (pool_) pool_->stop_growing();
    if (grower_.joinable()) grower_.join();
    join();
    for (const auto& job : unsettled_) {
      if (!job->untold_failure()) continue;
      try {
        job->tell();
      } catch (const std::exception& problem) {
        log::error(problem);
      }
    }
  }

  bool busy() const {
    return std::any_of(unsettled_.begin(), unsettled_.end(),
                       [](const auto& job) { return !job->is_done(); });
  }

  // Ranks learn at different times how a save ended, but must all throw in the same call, or one of
  // them would skip a step. So they exchange how far it is until all know the outcome.
  void check() override {
    while (!unsettled_.empty()) {
      const auto oldest = unsettled_.front();
      const SaveStage mine = !oldest->is_done()         ? SaveStage::kWriting
                             : oldest->untold_failure() ? SaveStage::kFailed
                                                        : SaveStage::kSaved;
      const SaveStage all = largest(world_, "the previous save", mine);
      if (all == SaveStage::kWriting) return;
      unsettled_.pop_front();
      if (all == SaveStage::kFailed) oldest->tell();
    }
  }

  void before_change() override {
    for (const auto& job : unsettled_) job->staging->await_copies();
  }

  void wait() {
    join();
    check();
  }

  // Where saves are copied to. The first call decides about its limit; 0: the default.
  const std::shared_ptr<SavePool>& pool(int64_t limit = 0) {
    if (limit <= 0 && !pool_) limit = default_pool(world_.local_size());
    if (!pool_) pool_ = std::make_shared<SavePool>(limit, device_);
    return pool_;
  }

  // Allocates the pool's memory in the background.
  void grow_pool(int64_t bytes, int64_t limit) {
    if (grower_.joinable()) return;
    pool(limit)->expect(bytes);
    grower_ = std::thread([pool = pool_] {
      try {
        pool->grow();
      } catch (const std::exception&) {  // the save reports it
      }
    });
  }

  void start(std::shared_ptr<AsyncSave::Job> job, Save save, SavePlan plan, Exchange exchange) {
    unsettled_.push_back(job);
    worker_ =
        std::thread([before = std::move(worker_), job = std::move(job), save = std::move(save),
                     plan = std::move(plan), exchange = std::move(exchange)]() mutable {
          if (before.joinable()) before.join();
          std::exception_ptr error;
          try {
            const ReadChunk read = [&](const PlannedChunk& chunk, const auto& use) {
              job->staging->read(static_cast<int64_t>(chunk.part.memory.nbytes()), use);
            };
            save.finish(plan, read, exchange);
          } catch (...) {
            error = std::current_exception();
          }
          job->staging->cancel();
          job->end(error);
        });
  }

 private:
  void join() {
    if (worker_.joinable()) worker_.join();
  }

  World world_;
  at::Device device_;
  std::shared_ptr<SavePool> pool_;
  std::thread grower_;
  std::deque<std::shared_ptr<AsyncSave::Job>> unsettled_;  // not all ranks know how they ended
  std::thread worker_;  // of the last save; it joins that of the save before
};

std::shared_ptr<Saver> saver_of(shard::Engine& model) {
  if (!shard::background_of(model))
    shard::set_background(model,
                          std::make_shared<Saver>(shard::world_of(model), shard::device_of(model)));
  return std::static_pointer_cast<Saver>(shard::background_of(model));
}

}  // namespace

void save(const std::filesystem::path& dir, const Sharded& sharded, const Optimizer* optimizer,
          const SaveOptions& options) {
  const auto model = shard::model_of(sharded);
  const Save save{model->world(), std::filesystem::absolute(checked_name(dir)), options.keep_last};
  const auto engine = model->lock();
  require_same_model(model, optimizer, "checkpoint::save");
  if (shard::background_of(*engine)) saver_of(*engine)->wait();
  shard::Unseen unseen;
  save.begin();
  SavePlan plan;
  try {
    together(save.world, save.label() + ": plan",
             [&] { plan = plan_save(*engine, optimizer, options); });
  } catch (...) {
    if (save.world.rank() == 0) drop_partial(save.name);
    throw;
  }
  save.finish_now(plan);
}

PoolRoom prepare_async(const Sharded& sharded, const Optimizer* optimizer, int64_t pool) {
  const auto model = shard::model_of(sharded);
  const auto engine = model->lock();
  require_same_model(model, optimizer, "checkpoint::save");
  shard::Unseen unseen;
  const auto saver = saver_of(*engine);
  const int64_t bytes = plan_save(*engine, optimizer, {}).bytes();
  saver->grow_pool(bytes, pool);
  return {bytes, saver->pool()->limit()};
}

// Null: there is no memory for it.
static std::shared_ptr<Staging> start_copy(Saver& saver, const SavePlan& plan, const Save& save,
                                           at::Device device) {
  try {
    if (files::ask_seam("copy", save.name) != 0) return nullptr;
    auto staging = std::make_shared<Staging>(saver.pool(), device);
    staging->start(plan);
    return staging;
  } catch (const std::exception& problem) {
    if (!is_out_of_memory(problem)) throw;  // an illegal memory access, for one, isn't
    return nullptr;
  }
}

// Whether to go on with a save although the one before is still being written.
static bool goes_on(Saver& saver, const Save& save, const SavePlan& plan, IfBusy if_busy) {
  // Ranks finish at different times, so they must agree.
  if (!largest(save.world, save.label() + ": busy", saver.busy())) return true;
  switch (if_busy) {
    case IfBusy::REFUSE:
      throw Error(formatted("{}: the previous save isn't finished.", save.name),
                  "save less often, call wait() on it first, or use another IfBusy.");
    case IfBusy::WAIT:
      saver.wait();
      return true;
    case IfBusy::QUEUE:
      return !largest(save.world, save.label() + ": room", !saver.pool()->has_room(plan.bytes()));
    case IfBusy::SKIP:
      break;
  }
  return false;
}

AsyncSave save_async(const std::filesystem::path& dir, const Sharded& sharded,
                     const Optimizer* optimizer, const SaveOptions& options) {
  const auto begun = Clock::now();
  const auto model = shard::model_of(sharded);
  const Save save{model->world(), std::filesystem::absolute(checked_name(dir)), options.keep_last};
  const auto engine = model->lock();
  require_same_model(model, optimizer, "checkpoint::save");
  const auto saver = saver_of(*engine);
  saver->check();
  shard::Unseen unseen;
  AsyncSave handle;
  handle.job_ = std::make_shared<AsyncSave::Job>();
  SavePlan plan;
  const auto planned = [&] { plan = plan_save(*engine, optimizer, options); };
  together(save.world, save.label() + ": plan", planned);
  if (!goes_on(*saver, save, plan, options.if_busy)) {
    handle.job_->skipped = true;
    handle.job_->end(nullptr);
    return handle;
  }
  save.begin();
  std::shared_ptr<Staging> staging;
  bool copied = true;
  try {
    together(save.world, save.label() + ": copy",
             [&] { staging = start_copy(*saver, plan, save, model->device()); });
    copied = !largest(save.world, save.label() + ": copied", !staging);
    if (!copied && save.world.rank() == 0)
      log::warn(formatted(
          "{}: a host is out of memory for the copy of a background save, so training waits "
          "until the checkpoint is written (checkpoint.async = false always does).",
          save.name));
  } catch (...) {
    if (save.world.rank() == 0) drop_partial(save.name);
    throw;
  }
  if (!copied) {
    saver->wait();
    save.finish_now(plan);
    handle.job_->end(nullptr);
    return handle;
  }
  handle.job_->staging = std::move(staging);
  handle.job_->blocked = Clock::now() - begun;
  saver->start(handle.job_, save, std::move(plan),
               by_store(save.world, formatted("save/{}", comm::next_number(save.world))));
  return handle;
}

}  // namespace fsdp::checkpoint
