// save and save_async: every rank writes its shards into a file of its own. Rank 0 also writes the
// replicated tensors and the metadata, and publishes the checkpoint.
#include <chrono>
#include <exception>
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

SaveReport write_file(const SavePlan& plan, const Path& folder, int rank) {
  SaveReport report;
  files::Output out(folder / file_of(rank), plan.bytes());
  for (const auto& value : plan.values)
    report.metadata.add_value(value.path, write_value(out, value.put));
  ChunkReader reader(plan);
  for (const auto& chunk : plan.chunks) {
    const ItemPlace place = write_tensor(out, reader.read(chunk));
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

  void finish(const SavePlan& plan, const Exchange& exchange) const {
    const Path partial = partial_of(name);
    const auto write = [&] {
      const SaveReport report = write_file(plan, partial, world.rank());
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
};

}  // namespace

// --- in the background ---

struct AsyncSave::Job {
  std::chrono::nanoseconds blocked{};
  Mutex mutex;
  Condition ended;
  bool done FSDP_GUARDED_BY(mutex) = false;
  bool told FSDP_GUARDED_BY(mutex) = false;  // the failure was reported to the caller
  std::exception_ptr error FSDP_GUARDED_BY(mutex);

  void end(std::exception_ptr why) {
    Lock lock(mutex);
    error = std::move(why);
    done = true;
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
  return job_ ? job_->blocked : std::chrono::nanoseconds{};
}

namespace {

// Of a save in the background. That of all ranks together is the largest of theirs.
enum class SaveStage { kSaved, kFailed, kWriting };

// The saves of one model, one after the other.
class Saver : public shard::Background {
 public:
  explicit Saver(World world) : world_(std::move(world)) {}
  ~Saver() override {
    join();
    if (!last_ || settled_ || !last_->untold_failure()) return;
    try {
      last_->tell();
    } catch (const std::exception& problem) {
      log::error(problem);
    }
  }

  bool busy() const { return last_ && !last_->is_done(); }

  // Ranks learn at different times how a save ended, but must all throw in the same call, or one of
  // them would skip a step. So they exchange how far it is until all know the outcome.
  void check() override {
    if (!last_ || settled_) return;
    const SaveStage mine = !last_->is_done()         ? SaveStage::kWriting
                           : last_->untold_failure() ? SaveStage::kFailed
                                                     : SaveStage::kSaved;
    const SaveStage all = largest(world_, "the previous save", mine);
    if (all == SaveStage::kWriting) return;
    settled_ = true;
    if (all == SaveStage::kFailed) last_->tell();
  }

  void wait() {
    join();
    check();
  }

  // Allocates the memory for a save in the background.
  void reserve(Staging::Size size) {
    join();
    worker_ = std::thread([this, size] {
      try {
        staging.reserve(size);
      } catch (const std::exception&) {  // the save reports it
      }
    });
  }

  void start(std::shared_ptr<AsyncSave::Job> job, Save save, SavePlan plan, Exchange exchange) {
    last_ = std::move(job);
    settled_ = false;
    worker_ = std::thread([job = last_, save = std::move(save), plan = std::move(plan),
                           exchange = std::move(exchange)] {
      std::exception_ptr error;
      try {
        save.finish(plan, exchange);
      } catch (...) {
        error = std::current_exception();
      }
      job->end(error);
    });
  }

  Staging staging;

 private:
  void join() {
    if (worker_.joinable()) worker_.join();
  }

  World world_;
  std::shared_ptr<AsyncSave::Job> last_;
  bool settled_ = true;  // all ranks know how the last save ended
  std::thread worker_;
};

std::shared_ptr<Saver> saver_of(shard::Engine& model) {
  if (!shard::background_of(model))
    shard::set_background(model, std::make_shared<Saver>(shard::world_of(model)));
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
  save.finish(plan, by_collectives(save.world));
}

void prepare_async(const Sharded& sharded, const Optimizer* optimizer) {
  const auto model = shard::model_of(sharded);
  const auto engine = model->lock();
  require_same_model(model, optimizer, "checkpoint::save");
  shard::Unseen unseen;
  const auto saver = saver_of(*engine);
  if (!saver->busy()) saver->reserve(Staging::size_of(plan_save(*engine, optimizer, {})));
}

// False: there is no memory for it.
static bool copy_to_host(Staging& staging, SavePlan& plan, const std::filesystem::path& name) {
  try {
    if (files::ask_seam("copy", name) != 0) return false;
    staging.take(plan);
    return true;
  } catch (const std::exception& problem) {
    if (!is_out_of_memory(problem)) throw;  // an illegal memory access, for one, isn't
    return false;
  }
}

AsyncSave save_async(const std::filesystem::path& dir, const Sharded& sharded,
                     const Optimizer* optimizer, const SaveOptions& options) {
  const auto begun = Clock::now();
  const auto model = shard::model_of(sharded);
  const Save save{model->world(), std::filesystem::absolute(checked_name(dir)), options.keep_last};
  const auto engine = model->lock();
  require_same_model(model, optimizer, "checkpoint::save");
  const auto saver = saver_of(*engine);
  // Ranks finish at different times, so they must agree.
  if (options.if_busy == IfBusy::REFUSE &&
      largest(save.world, save.label() + ": busy", saver->busy()))
    throw Error(formatted("{}: the previous save isn't finished.", save.name),
                "save less often, call wait() on it first, or use IfBusy::WAIT.");
  saver->wait();
  shard::Unseen unseen;
  save.begin();
  SavePlan plan;
  const auto planned = [&] { plan = plan_save(*engine, optimizer, options); };
  bool copied = true;
  try {
    together(save.world, save.label() + ": copy", [&] {
      planned();
      copied = copy_to_host(saver->staging, plan, save.name);
    });
    copied = !largest(save.world, save.label() + ": copied", !copied);
    if (!copied) {
      plan = {};
      saver->staging = {};
      if (save.world.rank() == 0)
        log::warn(formatted(
            "{}: a host is out of memory for the copy of a background save, so training waits "
            "until the checkpoint is written (checkpoint.async = false always does).",
            save.name));
      together(save.world, save.label() + ": plan", planned);
    }
  } catch (...) {
    if (save.world.rank() == 0) drop_partial(save.name);
    throw;
  }
  if (!copied) {
    save.finish(plan, by_collectives(save.world));
    return {};
  }
  AsyncSave handle;
  handle.job_ = std::make_shared<AsyncSave::Job>();
  handle.job_->blocked = Clock::now() - begun;
  saver->start(handle.job_, save, std::move(plan),
               by_store(save.world, formatted("save/{}", comm::next_number(save.world))));
  return handle;
}

}  // namespace fsdp::checkpoint
