#include "checkpoint/verify.h"

#include <libdeflate.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <thread>

#include "base/format.h"
#include "base/mutex.h"
#include "checkpoint/cover.h"
#include "checkpoint/damaged.h"
#include "checkpoint/hugging_face.h"
#include "checkpoint/intact.h"
#include "checkpoint/overlap.h"
#include "checkpoint/source.h"
#include "checkpoint/zip.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kReadPiece = 8 << 20;  // bytes per read of one thread
static_assert(kReadPiece % kSumBlock == 0);

// Calls act(0) … act(count - 1), each by one of a few threads. `act` must not throw.
void in_threads(size_t count, int threads, const std::function<void(size_t)>& act) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next++) < count;) act(i);
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads && static_cast<size_t>(i) < count; ++i) others.emplace_back(work);
  work();
  for (auto& other : others) other.join();  // Ends: with the files
}

// A message without its leading path and its full stop: a problem names its file separately.
std::string without(const fs::path& path, std::string message) {
  const std::string prefix = path.string() + ": ";
  if (message.starts_with(prefix)) message.erase(0, prefix.size());
  if (message.ends_with('.')) message.pop_back();
  return message;
}

class Verifier {
 public:
  Verifier(const fs::path& dir, const VerifyOptions& options) : dir_(dir), options_(options) {
    threads_ = options.threads > 0 ? options.threads
                                   : std::clamp<int>(std::thread::hardware_concurrency(), 1, 8);
  }

  Verified run() {
    read_lists();
    compare_lists();
    if (manifest_)
      check_blocks();
    else
      check_records();
    check_items();
    for (const auto& [name, entry] : metadata_.tensors)
      if (auto what = cover_problem(entry); !what.empty())
        add({kMetadataName, -1, -1, what, {name}});
    Lock lock(mutex_);
    std::sort(problems_.begin(), problems_.end(), [](const Problem& a, const Problem& b) {
      return std::tie(a.file, a.begin, a.end, a.what) < std::tie(b.file, b.begin, b.end, b.what);
    });
    result_.problems = std::move(problems_);
    return std::move(result_);
  }

 private:
  struct ItemUse {  // of an item by a name; a plain value has no chunk
    std::string name;
    const TensorEntry* entry = nullptr;
    const StoredChunk* chunk = nullptr;
  };
  struct StoredItem {
    ItemPlace place;
    std::vector<ItemUse> uses;
    std::vector<std::string> names() const {
      std::vector<std::string> all;
      for (const auto& use : uses) all.push_back(use.name);
      return all;
    }
  };

  void add(Problem problem) {
    Lock lock(mutex_);
    problems_.push_back(std::move(problem));
  }

  void advance(int64_t bytes) {
    Lock lock(mutex_);
    done_ += bytes;
    if (options_.progress) options_.progress(done_, total_);
  }

  // --- listed files against existing files ---

  void read_lists() {
    try {
      manifest_ = read_manifest(dir_);
    } catch (const Error& error) {
      add({kManifestName, -1, -1, without(dir_ / kManifestName, error.message()), {}});
    }
    result_.sums = manifest_ ? ChecksumKind::kBlocks : ChecksumKind::kRecords;
    const auto file = dir_ / kMetadataName;
    std::error_code problem;
    if (fs::is_regular_file(file, problem)) {
      try {
        metadata_ = read_metadata(dir_);
        listed_ = true;
      } catch (const Error& error) {
        add({kMetadataName, -1, -1, without(file, error.message()), {}});
      }
    }
    check_mark();
    result_.tensors = static_cast<int64_t>(metadata_.tensors.size());
    using Key = std::tuple<std::string, int64_t, int64_t>;
    std::map<Key, StoredItem> items;
    const auto use = [&](const ItemPlace& place, ItemUse use) {
      auto& item = items[{place.file, place.offset, place.length}];
      item.place = place;
      item.uses.push_back(std::move(use));
    };
    for (const auto& [name, entry] : metadata_.tensors)
      for (const auto& chunk : entry.chunks) use(chunk.place, {name, &entry, &chunk});
    for (const auto& [name, place] : metadata_.values) use(place, {name});
    for (auto& [key, item] : items) items_[item.place.file].push_back(std::move(item));
  }

  void check_mark() {
    std::error_code problem;
    if (!manifest_ && fs::exists(dir_ / kManifestName, problem)) return;  // it is already listed
    try {
      require_mark(dir_, metadata_, manifest_ ? &*manifest_ : nullptr);
    } catch (const Damaged& error) {
      add({kManifestName, -1, -1, without(dir_ / kManifestName, error.message()), {}});
    }
  }

  void compare_lists() {
    std::error_code problem;
    fs::directory_iterator at(dir_, problem), end;
    if (problem)
      throw Error(formatted("{} can't be read: {}.", dir_, problem.message()),
                  "check the path and its permissions.");
    for (; at != end; at.increment(problem)) {
      std::error_code ignored;
      const auto name = at->path().filename().string();
      if (at->is_regular_file(ignored))
        sizes_[name] = static_cast<int64_t>(at->file_size(ignored));
      else
        add({name, -1, -1, "isn't a regular file, and nothing lists it", {}});
    }
    if (problem) add({"", -1, -1, "the directory can't be read: " + problem.message(), {}});

    std::set<std::string> wanted = {kMetadataName};
    for (const auto& [name, items] : items_) wanted.insert(name);
    if (manifest_)
      for (const auto& [name, sums] : manifest_->files) wanted.insert(name);
    for (const auto& name : wanted) {
      const auto found = sizes_.find(name);
      if (found == sizes_.end())
        add({name, -1, -1, "is missing", names_in(name, 0, INT64_MAX)});
      else
        check_size(name, found->second);
    }
    for (const auto& [name, size] : sizes_) {
      result_.files += 1;
      result_.bytes += size;
      // A rank with nothing to write leaves an empty file, which Python's metadata doesn't list.
      if (name == kManifestName || wanted.contains(name) || !(listed_ || manifest_)) continue;
      if (size > 0 || !name.ends_with(".distcp"))
        add({name, -1, -1, "exists, but nothing lists it", {}});
    }
  }

  void check_size(const std::string& name, int64_t size) {
    int64_t expected = 0;
    if (manifest_) {
      const auto found = manifest_->files.find(name);
      if (found == manifest_->files.end())
        return add({name, -1, -1, "is not in the manifest", names_in(name, 0, INT64_MAX)});
      expected = found->second.size;
    } else {
      if (name == kMetadataName) return;
      for (const auto& item : items_[name]) expected = std::max(expected, end_of(item.place));
    }
    if (size < expected)
      add({name, size, expected,
           formatted("was truncated or copied incompletely: it has {} bytes", size),
           names_in(name, size, expected)});
    if (size > expected) add({name, expected, size, "is longer than its listed contents", {}});
  }

  static int64_t end_of(const ItemPlace& place) { return capped_sum(place.offset, place.length); }

  std::vector<std::string> names_in(const std::string& file, int64_t begin, int64_t end) const {
    std::vector<std::string> names;
    const auto found = items_.find(file);
    if (found == items_.end()) return names;
    for (const auto& item : found->second)
      if (item.place.offset < end && end_of(item.place) > begin)
        for (const auto& use : item.uses) names.push_back(use.name);
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
    return names;
  }

  std::unique_ptr<files::Input> open(const std::string& name) {
    if (!sizes_.contains(name)) return nullptr;  // already reported
    try {
      return std::make_unique<files::Input>(dir_ / name);
    } catch (const Error& error) {
      add({name, -1, -1, without(dir_ / name, error.message()), names_in(name, 0, INT64_MAX)});
      return nullptr;
    }
  }

  // --- blocks of files, by the manifest ---

  struct Stretch {
    const std::string* name;
    const FileSums* sums;
    const files::Input* file;
    int64_t begin, size;
  };

  void check_blocks() {
    std::vector<std::unique_ptr<files::Input>> opened;
    std::vector<Stretch> stretches;
    for (const auto& [name, sums] : manifest_->files) {
      opened.push_back(open(name));
      if (!opened.back()) continue;
      // Only the complete blocks of a truncated file.
      const int64_t held = opened.back()->size();
      const int64_t size = held >= sums.size ? sums.size : held - held % kSumBlock;
      total_ += size;
      for (int64_t at = 0; at < size; at += kReadPiece)
        stretches.push_back(
            {&name, &sums, opened.back().get(), at, std::min(kReadPiece, size - at)});
    }
    std::map<std::string, std::vector<int64_t>> damaged;  // blocks; under mutex_ while threads run
    in_threads(stretches.size(), threads_, [&](size_t i) {
      auto blocks = damaged_blocks(stretches[i]);
      if (!blocks.empty()) {
        Lock lock(mutex_);
        auto& all = damaged[*stretches[i].name];
        all.insert(all.end(), blocks.begin(), blocks.end());
      }
      advance(stretches[i].size);
    });
    for (auto& [name, blocks] : damaged) {
      std::sort(blocks.begin(), blocks.end());
      for (size_t i = 0; i < blocks.size();) {
        size_t next = i + 1;
        while (next < blocks.size() && blocks[next] == blocks[next - 1] + 1) ++next;
        const int64_t begin = blocks[i] * kSumBlock;
        const int64_t end =
            std::min((blocks[next - 1] + 1) * kSumBlock, manifest_->files.at(name).size);
        add({name, begin, end, "differs from what was written: checksum mismatch",
             names_in(name, begin, end)});
        add_damage(name, begin, end);
        i = next;
      }
    }
  }

  std::vector<int64_t> damaged_blocks(const Stretch& stretch) {
    std::vector<int64_t> blocks;
    const std::unique_ptr<char[]> buffer(new char[static_cast<size_t>(stretch.size)]);
    try {
      stretch.file->read(stretch.begin, buffer.get(), static_cast<size_t>(stretch.size));
    } catch (const Error& error) {
      const int64_t end = stretch.begin + stretch.size;
      add({*stretch.name, stretch.begin, end, without(stretch.file->path(), error.message()),
           names_in(*stretch.name, stretch.begin, end)});
      return blocks;
    }
    for (int64_t at = 0; at < stretch.size; at += kSumBlock) {
      const int64_t block = (stretch.begin + at) / kSumBlock;
      const auto size = static_cast<size_t>(std::min(kSumBlock, stretch.size - at));
      if (block_sum(buffer.get() + at, size) != stretch.sums->sums[static_cast<size_t>(block)])
        blocks.push_back(block);
    }
    return blocks;
  }

  // --- records of items, by their CRC-32 ---

  void check_records() {
    struct Task {
      const StoredItem* item;
      const files::Input* file;
    };
    std::vector<std::unique_ptr<files::Input>> opened;
    std::vector<Task> tasks;
    for (const auto& [name, items] : items_) {
      opened.push_back(open(name));
      if (!opened.back()) continue;
      int64_t end = 0;  // items are sorted by offset
      for (const auto& item : items) {
        const bool inside = end_of(item.place) <= opened.back()->size();
        if (inside && item.place.offset < end)
          add({name, item.place.offset, end_of(item.place), "overlaps the item before it",
               item.names()});
        if (!inside || item.place.offset < end) continue;
        end = end_of(item.place);
        total_ += item.place.length;
        tasks.push_back({&item, opened.back().get()});
      }
    }
    // The largest first, so that no thread is left with a large one at the end.
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
      return a.item->place.length > b.item->place.length;
    });
    in_threads(tasks.size(), threads_, [&](size_t i) {
      const StoredItem& item = *tasks[i].item;
      int64_t counted = 0;
      try {
        check_archive(item, *tasks[i].file, counted);
      } catch (const Error& error) {
        note_damage(item, item.place.offset, end_of(item.place),
                    without(tasks[i].file->path(), error.message()));
      }
      advance(item.place.length - counted);
    });
  }

  void check_archive(const StoredItem& item, const files::Input& file, int64_t& counted) {
    const std::string where = "\"" + item.uses.front().name + "\"";
    const ArchiveReader archive(file, item.place.offset, item.place.length, where);
    const auto records = archive.records();
    int64_t bytes = 0;
    for (const auto& record : records) bytes += std::min(record.size, item.place.length - bytes);
    if (bytes >= item.place.length && !records.empty())
      return note_damage(item, item.place.offset, end_of(item.place), "has overlapping records");
    std::unique_ptr<char[]> buffer;
    for (const auto& record : records) {
      uint32_t sum = 0;
      if (!buffer)
        buffer.reset(new char[static_cast<size_t>(std::min(kReadPiece, item.place.length))]);
      for (int64_t at = 0; at < record.size; at += kReadPiece) {
        const auto size = static_cast<size_t>(std::min(kReadPiece, record.size - at));
        file.read(record.offset + at, buffer.get(), size);
        sum = libdeflate_crc32(sum, buffer.get(), size);
        counted += static_cast<int64_t>(size);
        advance(static_cast<int64_t>(size));
      }
      if (sum != record.sum)
        note_damage(item, record.offset, record.offset + record.size,
                    formatted("differs from what was written: CRC-32 mismatch in record \"{}\"",
                              record.name));
    }
  }

  void note_damage(const StoredItem& item, int64_t begin, int64_t end, const std::string& what) {
    add({item.place.file, begin, end, what, item.names()});
    add_damage(item.place.file, item.place.offset, end_of(item.place));
  }

  void add_damage(const std::string& file, int64_t begin, int64_t end) {
    Lock lock(mutex_);
    damaged_[file].emplace_back(begin, end);
  }

  bool is_damaged(const std::string& file, int64_t begin, int64_t end) {
    Lock lock(mutex_);
    const auto& bad = damaged_[file];
    return std::any_of(bad.begin(), bad.end(), [&](const auto& range) {
      return range.first < end && range.second > begin;
    });
  }

  // --- contents of items ---

  void check_items() {
    for (const auto& [name, items] : items_) {
      const auto file = open(name);
      if (!file) continue;
      for (const auto& item : items) {
        const int64_t end = end_of(item.place);
        const bool told = is_damaged(name, item.place.offset, end);
        if (manifest_ && end > manifest_->files[name].size)
          add({name, item.place.offset, end, "is listed beyond the end of the file", item.names()});
        if (told || end > file->size()) continue;
        try {
          const auto what = item_problem(*file, item);
          if (!what.empty()) add({name, item.place.offset, end, what, item.names()});
        } catch (const Error& error) {
          add({name, item.place.offset, end, without(file->path(), error.message()), item.names()});
        }
      }
    }
  }

  static std::string item_problem(const files::Input& file, const StoredItem& item) {
    std::optional<StoredTensor> found;
    for (const auto& use : item.uses) {
      const std::string where = "\"" + use.name + "\"";
      if (!use.chunk) {
        try {
          read_value(file, item.place, where);
        } catch (const pickle::UnknownClass&) {  // a value of some Python type isn't a problem
        }
        continue;
      }
      if (!found) found = find_tensor(file, item.place, where);
      if (found->sizes != use.chunk->rectangle.sizes || found->dtype != use.entry->dtype)
        return formatted(
            "doesn't match .metadata: holds a tensor of shape {} instead of {}, or of another "
            "dtype",
            shape_text(found->sizes), shape_text(use.chunk->rectangle.sizes));
    }
    return "";
  }

  const fs::path dir_;
  const VerifyOptions& options_;
  int threads_ = 1;
  std::optional<Manifest> manifest_;
  Metadata metadata_;
  bool listed_ = false;                                   // .metadata was read
  std::map<std::string, std::vector<StoredItem>> items_;  // by file, then by offset
  std::map<std::string, int64_t> sizes_;                  // of the files that exist
  int64_t total_ = 0;                                     // bytes to read
  Verified result_;                                       // without its problems
  Mutex mutex_;                                           // guards what threads write
  std::vector<Problem> problems_ FSDP_GUARDED_BY(mutex_);
  int64_t done_ FSDP_GUARDED_BY(mutex_) = 0;  // bytes read
  std::map<std::string, std::vector<std::pair<int64_t, int64_t>>> damaged_
      FSDP_GUARDED_BY(mutex_);  // bytes
};

Verified verify_hugging_face(const fs::path& dir) {
  Verified result;
  std::set<std::string> files;
  try {
    Source source(dir);
    for (const auto& [name, entry] : source.metadata().tensors) {
      ++result.tensors;
      for (const auto& chunk : entry.chunks) files.insert(chunk.place.file);
      try {
        source.check(name, everything(entry.sizes));
      } catch (const Error& error) {
        result.problems.push_back({"", -1, -1, without(dir, error.message()), {name}});
      }
    }
  } catch (const Error& error) {
    result.problems.push_back({"", -1, -1, without(dir, error.message()), {}});
  }
  for (const auto& file : files) {
    std::error_code problem;
    const auto size = fs::file_size(dir / file, problem);
    result.files += 1;
    if (!problem) result.bytes += static_cast<int64_t>(size);
  }
  return result;
}

}  // namespace

Verified verify(const fs::path& dir, const VerifyOptions& options) {
  std::error_code problem;
  if (!fs::is_directory(dir, problem))
    throw Error(formatted("{}: there is no such checkpoint.", dir), "check the path.");
  if (!fs::exists(dir / kMetadataName, problem) && is_hugging_face(dir))
    return verify_hugging_face(dir);
  return Verifier(dir, options).run();
}

}  // namespace fsdp::checkpoint
