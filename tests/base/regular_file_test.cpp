// Files that aren't regular ones are refused at once and by name; others are read whole or by line.
#include "base/regular_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <vector>

#include "base/deadline.h"
#include "fsdp/error.h"

namespace fsdp::base {
namespace {

namespace fs = std::filesystem;

class RegularFiles : public ::testing::Test {
 protected:
  RegularFiles() {
    std::string made = (fs::temp_directory_path() / "fsdp-files-XXXXXX").string();
    if (!mkdtemp(made.data())) throw std::runtime_error("mkdtemp failed");
    folder_ = made;
  }
  ~RegularFiles() override { fs::remove_all(folder_); }

  fs::path write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return folder_ / name;
  }
  fs::path fifo(const std::string& name) const {
    if (::mkfifo((folder_ / name).c_str(), 0600) != 0) throw std::runtime_error("mkfifo failed");
    return folder_ / name;
  }
  fs::path socket(const std::string& name) const {
    const fs::path path = folder_ / name;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
    const int made = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(::bind(made, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    ::close(made);
    return path;
  }
  static std::string error_of(const std::function<void()>& act) {
    try {
      act();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
  static std::vector<std::string> lines_of(const fs::path& path) {
    const RegularFile file(path);
    LineReader reader(file.or_throw());
    std::vector<std::string> lines;
    for (std::string line; reader.next(line);)
      lines.push_back(line + (reader.complete() ? "$" : ""));
    return lines;
  }

  fs::path folder_;
};

TEST_F(RegularFiles, WhatIsNotAFileIsRefusedAtOnceAndNamed) {
  const test::WithDeadline deadline;
  const std::pair<fs::path, const char*> cases[] = {
      {fifo("fifo"), "it is a FIFO"},  {socket("socket"), "it is a socket"},
      {"/dev/zero", "it is a device"}, {"/dev/tty", ""},
      {folder_, "it is a directory"},  {folder_ / "none", "No such file"}};
  for (const auto& [path, what] : cases) {
    for (const auto& read : {std::function<void()>([&] { read_file(path, 1 << 20); }),
                             std::function<void()>([&] { lines_of(path); })}) {
      const std::string error = error_of(read);
      EXPECT_NE(error.find(what), std::string::npos) << error;
      EXPECT_NE(error.find("can't read " + path.string()), std::string::npos) << error;
      EXPECT_NE(error.find("HINT"), std::string::npos) << error;
    }
    EXPECT_EQ(read_if_there(path), "");
  }
  fs::create_symlink(folder_ / "fifo", folder_ / "link");
  EXPECT_NE(error_of([&] { read_file(folder_ / "link", 9); }).find("FIFO"), std::string::npos);
}

TEST_F(RegularFiles, AFifoWithAWriterIsRefusedToo) {
  const test::WithDeadline deadline;
  const fs::path path = fifo("fifo");
  const int ends = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  EXPECT_EQ(::write(ends, "x", 1), 1);
  EXPECT_NE(error_of([&] { read_file(path, 9); }).find("FIFO"), std::string::npos);
  ::close(ends);
}

TEST_F(RegularFiles, AreReadWholeUpToALimit) {
  const std::string text(200'000, 'x');
  const fs::path path = write("text", text);
  EXPECT_EQ(read_file(path, 200'000), text);
  EXPECT_NE(error_of([&] { read_file(path, 199'999); }).find("more than 199999 bytes"),
            std::string::npos);
  EXPECT_EQ(read_file(write("empty", ""), 0), "");
  // Files of /proc say that they are empty.
  EXPECT_NE(read_file("/proc/self/stat", 1 << 20).find(std::to_string(::getpid())),
            std::string::npos);
  EXPECT_NE(error_of([&] { read_file("/proc/self/stat", 3); }).find("more than 3"),
            std::string::npos);
  EXPECT_EQ(::truncate(path.c_str(), off_t{1} << 40), 0);  // no block of it is stored
  EXPECT_NE(error_of([&] { read_file(path, 1 << 20); }).find("more than"), std::string::npos);
}

TEST_F(RegularFiles, AreReadByLine) {
  using Lines = std::vector<std::string>;
  EXPECT_EQ(lines_of(write("none", "")), Lines{});
  EXPECT_EQ(lines_of(write("some", "a\n\nb\r\nc")), (Lines{"a$", "$", "b\r$", "c"}));
  EXPECT_EQ(lines_of(write("last", "a\n")), Lines{"a$"});
  const std::string wide(100'000, 'x');  // wider than what is read at once
  EXPECT_EQ(lines_of(write("wide", wide + "\n" + wide)), (Lines{wide + "$", wide}));
  const std::string widest((16 << 20) + 5, 'x');
  const Lines lines = lines_of(write("widest", widest + "\nend\n"));
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0].size(), (size_t{16} << 20) + 1);
  EXPECT_EQ(lines[1], "end$");
}

TEST_F(RegularFiles, AFileIsOnlyWrittenWhereNothingElseStands) {
  const test::WithDeadline deadline;
  EXPECT_NO_THROW(place_of_file(folder_ / "new"));
  EXPECT_NO_THROW(place_of_file(write("old", "")));
  const std::string error = error_of([&] { std::ofstream out(place_of_file(fifo("fifo"))); });
  EXPECT_NE(error.find("it is a FIFO"), std::string::npos) << error;
  EXPECT_NE(error_of([&] { place_of_file("/dev/null"); }).find("a device"), std::string::npos);
}

}  // namespace
}  // namespace fsdp::base
