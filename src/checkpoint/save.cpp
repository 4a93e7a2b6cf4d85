// save and save_async: every rank writes its shards into a file of its own. Rank 0 also writes the
// replicated tensors and the metadata, and publishes the checkpoint.
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <optional>
#include <thread>

#include "base/format.h"
#include "base/log.h"
#include "base/mutex.h"
#include "checkpoint/files.h"
#include "checkpoint/folder.h"
#include "checkpoint/manifest.h"
#include "checkpoint/messages.h"
#include "checkpoint/same_model.h"
#include "checkpoint/save_file.h"
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
#include "shard/device_stream.h"

namespace fsdp::checkpoint {

// --- one save ---

namespace {

using Clock = std::chrono::steady_clock;
using Path = std::filesystem::path;

void delete_old_ones(const Path& folder, int64_t keep, const std::function<void()>& check) {
  if (check) check();
  try {
    keep_last(folder, keep, check);
  } catch (const std::exception& problem) {  // one checkpoint too many isn't an error
    log::warn(formatted("an old checkpoint could not be removed: {}", log::plain(problem)));
  }
}

// The exchanges of a save, in its order.
struct SaveExchanges {
  Exchange commit;
  Exchange spread, end;  // on each host
};

struct Save {
  Save(World world_, const Path& dir, const SaveOptions& options)
      : world(std::move(world_)),
        name(std::filesystem::absolute(checked_name(dir))),
        partial{name, options.owner.epoch, options.owner.check},
        keep(options.keep_last),
        on_each_host(options.on_each_host) {}

  World world;
  Path name;        // of the checkpoint
  Partial partial;  // its writer is rank 0's, known from begin() on
  int64_t keep = 0;
  bool on_each_host = false;

  std::string label() const { return "the checkpoint " + name.filename().string(); }
  // Whether this rank makes the folder and gives it its name.
  bool publishes() const { return world.rank() == 0 || (on_each_host && world.local_rank() == 0); }

  void begin() {
    partial.writer = told_by_first(world, label() + ": begin", [&] {
      if (world.rank() != 0) return std::string();
      if (partial.writer.empty()) partial.writer = new_writer();
      begin_partial(partial);
      return partial.writer;
    });
    if (!on_each_host || world.size() == world.local_size()) return;
    together(world, label() + ": begin on every host", [&] {
      if (publishes() && world.rank() != 0) begin_partial(partial);
    });
  }

  void drop() const noexcept {
    if (publishes()) drop_partial(partial);
  }

  void finish(const SavePlan& plan, const ReadChunk& read, const SaveExchanges& exchanges) const {
    try {
      const Written written = write_and_publish(plan, read, exchanges.commit);
      if (on_each_host && world.size() != world.local_size()) spread(written, exchanges);
    } catch (...) {
      drop();
      if (partial.check) partial.check();  // whoever took the folder is the reason
      throw;
    }
    if (keep > 0 && world.rank() == 0) delete_old_ones(name.parent_path(), keep, partial.check);
  }

  // Writes the tensors as they are now.
  void finish_now(const SavePlan& plan) const {
    ChunkReader reader(plan);
    const ReadChunk read = [&](const PlannedChunk& chunk, const auto& use) {
      for_each_piece(reader.read(chunk), use);
    };
    finish(plan, read, exchanges());
  }

  // Not by collectives, whose timeout would end a save because one rank's disk is slower.
  SaveExchanges exchanges() const {
    const std::string exchange = formatted("save/{}", comm::next_number(world));
    return {by_store(world, exchange), by_store(world, exchange + "/spread"),
            by_store(world, exchange + "/end")};
  }

 private:
  struct Written {  // on rank 0
    std::string metadata, manifest;
  };

  Written write_and_publish(const SavePlan& plan, const ReadChunk& read,
                            const Exchange& exchange) const {
    Written written;
    const Path folder = partial.path();
    int64_t done = 0;
    const ReadChunk reporting = [&](const PlannedChunk& chunk, const auto& use) {
      read(chunk, [&](const void* bytes, size_t size) {
        use(bytes, size);
        done += static_cast<int64_t>(size);
        if (exchange.progress) exchange.progress(done);
      });
    };
    const auto write = [&] {
      const SaveReport report = write_file(plan, reporting, folder, world.rank());
      files::sync_directory(folder);
      return report.encode();
    };
    const auto publish = [&](const std::vector<std::string>& reports) {
      SaveReport all;
      for (size_t rank = 0; rank < reports.size(); ++rank)
        all.add(SaveReport::decode(reports[rank], formatted("rank {}", rank)));
      all.metadata.mark = mark_of(all.manifest);
      written.metadata = encode(all.metadata);
      all.manifest.files[kMetadataName] =
          files::write_whole(folder / kMetadataName, written.metadata);
      written.manifest = encode_manifest(all.manifest);
      files::write_whole(folder / kManifestName, written.manifest);
      publish_partial(partial);
    };
    commit(world, exchange, label(), write, publish);
    return written;
  }

  // To the hosts without rank 0. A host that gets lost meanwhile keeps an incomplete checkpoint,
  // which doesn't count.
  void spread(const Written& written, const SaveExchanges& exchanges) const {
    const std::string cut = formatted("{}\n", written.metadata.size());
    const std::string told =
        exchanges.spread.from_first(label(), cut + written.metadata + written.manifest);
    const auto publish = [&] {
      if (!publishes() || world.rank() == 0) return std::string();
      const size_t begin = told.find('\n') + 1, size = std::stoull(told);
      const Path folder = partial.path();
      files::write_whole(folder / kMetadataName, told.substr(begin, size));
      files::write_whole(folder / kManifestName, told.substr(begin + size));
      publish_partial(partial);
      return std::string();
    };
    commit(world, exchanges.end, label() + " on every host", publish, [](const auto&) {});
    exchanges.spread.forget();
  }
};

}  // namespace

// --- in the background ---

struct AsyncSave::Job {
  std::chrono::nanoseconds blocked{};
  bool skipped = false, may_fail = false;
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
      // Ends: the worker waits for other ranks by the timeout (by_store), for the disk by its
      // limit.
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
    // Ends: it allocates one more piece at most.
    if (grower_.joinable()) grower_.join();
    join();
    for (const auto& job : unsettled_) {
      if (job->may_fail || !job->untold_failure()) continue;
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
      if (all == SaveStage::kFailed && !oldest->may_fail) oldest->tell();
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

  // Allocates the memory of saves in the background, on the device for the current stream.
  void grow_pool(int64_t bytes, int64_t limit, at::Device device) {
    if (grower_.joinable()) return;
    pool(limit)->expect(bytes);
    const auto stream = shard::current_stream(device);
    grower_ = std::thread([pool = pool_, stream, bytes] {
      try {
        std::optional<c10::StreamGuard> on;
        if (shard::has_streams(stream.device())) on.emplace(stream);
        pool->grow(/*device_bytes=*/bytes);
      } catch (const std::exception&) {  // the save reports it
      }
    });
  }

  void start(std::shared_ptr<AsyncSave::Job> job, Save save, SavePlan plan,
             SaveExchanges exchanges) {
    unsettled_.push_back(job);
    worker_ =
        std::thread([before = std::move(worker_), job = std::move(job), save = std::move(save),
                     plan = std::move(plan), exchanges = std::move(exchanges)]() mutable {
          if (before.joinable()) before.join();  // Ends: as this one
          std::exception_ptr error;
          try {
            const ReadChunk read = [&](const PlannedChunk& chunk, const auto& use) {
              job->staging->read(static_cast<int64_t>(chunk.part.memory.nbytes()), use);
            };
            save.finish(plan, read, exchanges);
          } catch (...) {
            error = std::current_exception();
          }
          job->staging->cancel();
          job->end(error);
        });
  }

 private:
  void join() {
    if (worker_.joinable()) worker_.join();  // Ends: see Job::wait()
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
  Save save(model->world(), dir, options);
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
    save.drop();
    throw;
  }
  save.finish_now(plan);
}

PoolRoom prepare_async(const Sharded& sharded, const Optimizer* optimizer, int64_t pool,
                       const Chosen& only) {
  const auto model = shard::model_of(sharded);
  const auto engine = model->lock();
  require_same_model(model, optimizer, "checkpoint::save");
  shard::Unseen unseen;
  const auto saver = saver_of(*engine);
  const int64_t bytes = plan_save(*engine, optimizer, {.only = only}).bytes();
  saver->grow_pool(bytes, pool, model->device());
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
  Save save(model->world(), dir, options);
  const auto engine = model->lock();
  require_same_model(model, optimizer, "checkpoint::save");
  const auto saver = saver_of(*engine);
  saver->check();
  shard::Unseen unseen;
  AsyncSave handle;
  handle.job_ = std::make_shared<AsyncSave::Job>();
  handle.job_->may_fail = options.may_fail;
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
    if (!copied && !options.may_fail && save.world.rank() == 0)
      log::warn(formatted(
          "{}: a host is out of memory for the copy of a background save, so training waits "
          "until the checkpoint is written (checkpoint.async = false always does).",
          save.name));
  } catch (...) {
    save.drop();
    throw;
  }
  if (!copied && options.may_fail) {
    save.drop();
    handle.job_->skipped = true;
    handle.job_->end(nullptr);
    return handle;
  }
  if (!copied) {
    saver->wait();
    save.finish_now(plan);
    handle.job_->end(nullptr);
    return handle;
  }
  handle.job_->staging = std::move(staging);
  handle.job_->blocked = Clock::now() - begun;
  saver->start(handle.job_, save, std::move(plan), save.exchanges());
  return handle;
}

}  // namespace fsdp::checkpoint
