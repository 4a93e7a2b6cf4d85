// Drafts: files and directories that appear when they are complete, and who may write them.
#include "checkpoint/draft.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <utility>

#include "base/deadline.h"
#include "base/seams.h"
#include "checkpoint/folder.h"
#include "checkpoint/test_files.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string contents(const fs::path& file) {
  return files::read_whole(file, 1 << 20);
}

std::vector<std::string> entries_of(const fs::path& dir) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(dir))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

bool any_name(const std::string&) {
  return true;
}

TEST(Drafts, AFileAppearsWhenItIsPublished) {
  Folder folder;
  const fs::path target = folder.path / "new" / "out";
  {
    DraftFile draft(target, false);
    files::write_whole(draft.path(), "half");
    EXPECT_FALSE(fs::exists(target));
  }
  EXPECT_TRUE(entries_of(folder.path / "new").empty());
  {
    DraftFile draft(target, false);
    files::write_whole(draft.path(), "whole");
    draft.publish();
  }
  EXPECT_EQ(contents(target), "whole");
  EXPECT_TRUE(has(error_of([&] { DraftFile draft(target, false); }), "--force"));
  {
    DraftFile draft(target, true);
    files::write_whole(draft.path(), "again");
    EXPECT_EQ(contents(target), "whole");
    draft.publish();
  }
  EXPECT_EQ(contents(target), "again");
  EXPECT_EQ(entries_of(folder.path / "new"), std::vector<std::string>{"out"});
  EXPECT_TRUE(has(error_of([&] { DraftFile draft(folder.path, true); }), "is a directory"));
}

TEST(Drafts, ADirectoryReplacesOnlyItsOwnKind) {
  Folder folder;
  const fs::path target = folder.path / "out";
  const auto ours = [](const std::string& name) { return name == "mine" || name == "other"; };
  const auto write = [&](bool replace, const std::string& name) {
    DraftDirectory draft(target / "", replace, ours);
    files::write_whole(draft.path() / name, name);
    draft.publish();
  };
  fs::create_directory(target);  // an empty one may be replaced
  write(false, "mine");
  EXPECT_TRUE(has(error_of([&] { write(false, "other"); }), "already exists"));
  write(true, "other");
  EXPECT_EQ(entries_of(target), std::vector<std::string>{"other"});
  std::ofstream(target / "thesis.tex") << "years";
  EXPECT_TRUE(has(error_of([&] { write(true, "mine"); }), "thesis.tex"));
  EXPECT_EQ(entries_of(target), (std::vector<std::string>{"other", "thesis.tex"}));
  EXPECT_EQ(entries_of(folder.path), std::vector<std::string>{"out"});
}

TEST(Drafts, ADirectoryThatFailsLeavesTheOldOne) {
  Folder folder;
  const fs::path target = folder.path / "out";
  const auto ours = [](const std::string&) { return true; };
  fs::create_directory(target);
  std::ofstream(target / "old") << "old";
  {
    DraftDirectory draft(target, true, ours);
    files::write_whole(draft.path() / "new", "new");
  }
  EXPECT_EQ(entries_of(target), std::vector<std::string>{"old"});
  EXPECT_EQ(entries_of(folder.path), std::vector<std::string>{"out"});
}

// --- several processes ---

// A process that does something and then waits to be killed.
class Writer {
 public:
  explicit Writer(const std::function<void()>& act) {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("pipe failed");
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      try {
        act();
        [[maybe_unused]] const ssize_t told = write(ends[1], "x", 1);
        for (;;) pause();
      } catch (...) {
        _exit(1);
      }
    }
    close(ends[1]);
    char byte;
    if (read(ends[0], &byte, 1) != 1) ADD_FAILURE() << "the writer failed";
    close(ends[0]);
  }
  ~Writer() { end(); }
  void end() {
    if (pid_ == 0) return;
    kill(pid_, SIGKILL);
    waitpid(std::exchange(pid_, 0), nullptr, 0);
  }
  std::string name() const { return "process " + std::to_string(pid_) + " on "; }

 private:
  pid_t pid_ = 0;
};

TEST(DraftsOfSeveral, ASecondWriterOfAFileIsRefusedAndALeftoverIsReplaced) {
  Folder folder;
  const fs::path target = folder / "out.pt";
  Writer first([&] {
    auto* draft = new DraftFile(target, false);
    std::ofstream(draft->path()) << "theirs" << std::flush;
  });
  for (const bool replace : {false, true}) {
    const std::string error = error_of([&] { DraftFile draft(target, replace); });
    EXPECT_TRUE(has(error, (folder / "out.pt.partial").string())) << error;
    EXPECT_TRUE(has(error, "is being written by " + first.name())) << error;
  }
  EXPECT_EQ(contents(folder / "out.pt.partial"), "theirs");
  first.end();
  EXPECT_EQ(entries_of(folder.path),
            (std::vector<std::string>{"out.pt.partial", "out.pt.partial.lock"}));
  {
    DraftFile draft(target, false);
    EXPECT_FALSE(fs::exists(draft.path()));
    files::write_whole(draft.path(), "ours");
    draft.publish();
  }
  EXPECT_EQ(contents(target), "ours");
  EXPECT_EQ(entries_of(folder.path), std::vector<std::string>{"out.pt"});
}

TEST(DraftsOfSeveral, ASecondWriterOfADirectoryIsRefusedAndALeftoverIsReplaced) {
  Folder folder;
  const fs::path target = folder / "out";
  Writer first([&] {
    auto* draft = new DraftDirectory(target, false, any_name);
    std::ofstream(draft->path() / "theirs") << "theirs" << std::flush;
  });
  const std::string error = error_of([&] { DraftDirectory draft(target, true, any_name); });
  EXPECT_TRUE(has(error, (folder / "out.partial").string())) << error;
  EXPECT_TRUE(has(error, "is being written by " + first.name())) << error;
  EXPECT_EQ(entries_of(folder / "out.partial"), std::vector<std::string>{"theirs"});
  first.end();
  {
    DraftDirectory draft(target, false, any_name);
    files::write_whole(draft.path() / "ours", "ours");
    draft.publish();
  }
  EXPECT_EQ(entries_of(target), std::vector<std::string>{"ours"});
  EXPECT_EQ(entries_of(folder.path), std::vector<std::string>{"out"});
}

// Writers of one name, killed at any point: what has the name is one writer's, and whole.
TEST(DraftsOfSeveral, WritersThatAreKilledAnywhereLeaveOneWholeResult) {
  const test::WithDeadline deadline;
  Folder folder;
  const fs::path target = folder / "out";
  const int published = eventfd(0, EFD_CLOEXEC);
  ASSERT_GE(published, 0);
  std::vector<pid_t> writers;
  for (int writer = 0; writer < 4; ++writer) {
    writers.push_back(fork());
    if (writers.back() != 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int round = 0;; ++round) try {
        DraftDirectory draft(target, true, any_name);
        const std::string text = std::to_string(writer) + "-" + std::to_string(round);
        for (const char* name : {"a", "b"}) std::ofstream(draft.path() / name) << text;
        draft.publish();
        eventfd_write(published, 1);
      } catch (const std::exception&) {  // another one is writing
      }
  }
  for (const pid_t writer : writers) {  // each is killed after another result
    eventfd_t results = 0;
    EXPECT_EQ(eventfd_read(published, &results), 0);  // waits for one, and forgets all until now
    EXPECT_EQ(eventfd_read(published, &results), 0);
    kill(writer, SIGKILL);
    waitpid(writer, nullptr, 0);
  }
  close(published);
  EXPECT_EQ(entries_of(target), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(contents(target / "a"), contents(target / "b"));
  {
    DraftDirectory draft(target, true, any_name);
    files::write_whole(draft.path() / "c", "c");
    draft.publish();
  }
  EXPECT_EQ(entries_of(target), std::vector<std::string>{"c"});
  EXPECT_EQ(entries_of(folder.path), std::vector<std::string>{"out"});
}

TEST(DraftsOfSeveral, WhatNoProcessOfOursHasBegunStays) {
  Folder folder;
  std::ofstream(folder / "out.partial") << "a download";
  EXPECT_TRUE(has(error_of([&] { DraftFile draft(folder / "out", true); }),
                  (folder / "out.partial").string() + ": is in the way"));
  EXPECT_EQ(contents(folder / "out.partial"), "a download");
  EXPECT_EQ(entries_of(folder.path), std::vector<std::string>{"out.partial"});
}

TEST(DraftsOfSeveral, AnotherUsersDraftIsAnErrorThatSaysSo) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  Folder folder;
  fs::permissions(folder.path, fs::perms::all | fs::perms::sticky_bit);
  const fs::path target = folder / "out";
  std::string theirs;
  {
    Writer root([&] { new DraftFile(target, false); });
    theirs = root.name();
  }
  Writer other([&] {
    if (setuid(65534) != 0) _exit(2);
    const std::string error = error_of([&] { DraftFile draft(target, false); });
    std::ofstream(folder / "error") << error << std::flush;
  });
  const std::string error = contents(folder / "error");
  EXPECT_TRUE(
      has(error, (folder / "out.partial").string() + ": belongs to another user: " + theirs))
      << error;
  EXPECT_TRUE(fs::exists(folder / "out.partial.lock"));
}

TEST(DraftsOfSeveral, WithoutLocksALeftoverIsAnErrorThatSaysWhatToRemove) {
  Folder folder;
  const fs::path target = folder / "out";
  Seams without;
  without.files = [](const char* call, const fs::path&) {
    return std::string(call) == "flock" ? ENOLCK : 0;
  };
  const WithSeams seams(std::move(without));
  Writer writer([&] { new DraftFile(target, false); });
  writer.end();
  const std::string error = error_of([&] { DraftFile draft(target, true); });
  EXPECT_TRUE(has(error, (folder / "out.partial").string() + ": was begun by process ")) << error;
  EXPECT_TRUE(has(error, "remove it and out.partial.lock")) << error;
  fs::remove(folder / "out.partial.lock");
  DraftFile draft(target, true);
  files::write_whole(draft.path(), "whole");
  draft.publish();
  EXPECT_EQ(contents(target), "whole");
}

TEST(DraftsOfSeveral, ADraftWhoseLockIsGoneIsNeitherPublishedNorRemoved) {
  Folder folder;
  const fs::path target = folder / "out";
  {
    DraftFile draft(target, false);
    files::write_whole(draft.path(), "whose?");
    fs::remove(folder / "out.partial.lock");
    EXPECT_TRUE(has(error_of([&] { draft.publish(); }), "its lock file was removed"));
  }
  EXPECT_EQ(contents(folder / "out.partial"), "whose?");
  EXPECT_FALSE(fs::exists(target));
}

// A run that takes over the folder of its checkpoints leaves an export into it alone.
TEST(DraftsOfSeveral, ARunDoesNotEndAnExport) {
  Folder folder;
  {
    DraftDirectory draft(folder / "hf", false, any_name);
    files::write_whole(draft.path() / "config.json", "{}");
    fence(folder.path, "a run");
    draft.publish();
  }
  EXPECT_EQ(entries_of(folder / "hf"), std::vector<std::string>{"config.json"});
}

}  // namespace
}  // namespace fsdp::checkpoint
