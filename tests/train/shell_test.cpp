// Suggested commands: quoting, and how to call fsdp from where the user stands.
#include "train/shell.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;

std::string output_of(const std::string& command) {
  std::string out;
  FILE* pipe = popen(command.c_str(), "r");
  char buffer[256];
  while (size_t got = fread(buffer, 1, sizeof buffer, pipe)) out.append(buffer, got);
  pclose(pipe);
  return out;
}

TEST(ShellWord, IsOneWordForAShell) {
  EXPECT_EQ(shell_word("runs/demo-2"), "runs/demo-2");
  EXPECT_EQ(shell_word("my runs"), "'my runs'");
  for (const char* text :
       {"", "a b", "it's", "$HOME", "a\"b\\", "#x", "*", "~", "-", "a;b", "é\n."})
    EXPECT_EQ(output_of("printf '[%s]' " + shell_word(text)), "[" + std::string(text) + "]");
}

class Command : public testing::Test {
 protected:
  Command() {
    std::string name = (fs::temp_directory_path() / "fsdp-shell-XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("no temporary folder");
    top_ = fs::canonical(name);
  }
  ~Command() override { fs::remove_all(top_); }

  fs::path program(const std::string& name) {
    fs::create_directories((top_ / name).parent_path());
    std::ofstream(top_ / name) << "#!/bin/sh\n";
    fs::permissions(top_ / name, fs::perms::owner_all);
    return top_ / name;
  }
  // A checkout at `name` with a build folder elsewhere.
  fs::path built(const std::string& name, const std::string& build) {
    program(name + "/fsdp");
    fs::path binary = program(build + "/bin/fsdp");
    std::ofstream(top_ / build / "CMakeCache.txt")
        << "# a comment\nA:PATH=x\nCMAKE_HOME_DIRECTORY:INTERNAL=" << (top_ / name).string()
        << "\n";
    return binary;
  }
  fs::path folder(const std::string& name) {
    fs::create_directories(top_ / name);
    return top_ / name;
  }

  fs::path top_;
};

TEST_F(Command, OfABuildFolderIsTheWrapperOfItsCheckout) {
  fs::path binary = built("repo", "repo/build/release");
  EXPECT_EQ(fsdp_command(binary, top_ / "repo", "/nowhere"), "./fsdp");
  EXPECT_EQ(fsdp_command(binary, top_, "/nowhere"), "./repo/fsdp");
  EXPECT_EQ(fsdp_command(binary, folder("repo/docs"), "/nowhere"), "../fsdp");
  EXPECT_EQ(fsdp_command(binary, folder("work"), "/nowhere"), "../repo/fsdp");
  EXPECT_EQ(fsdp_command(binary, "/", "/nowhere"), "." + (top_ / "repo/fsdp").string());
  EXPECT_EQ(fsdp_command(built("repo", "elsewhere"), top_ / "repo", "/nowhere"), "./fsdp");
  EXPECT_EQ(fsdp_command(built("my repo", "b"), top_, "/nowhere"), "'./my repo/fsdp'");
  fs::path deep = folder("a/b/c/d/e/f/g/h/i/j/k/l/m/n/o/p/q/r/s/t/u/v/w/x/y/z/aa/bb/cc/dd/ee/ff");
  EXPECT_EQ(fsdp_command(binary, deep, "/nowhere"), (top_ / "repo/fsdp").string());
}

TEST_F(Command, OfAnInstalledBinaryIsItsNameIfTheShellFindsIt) {
  fs::path binary = program("usr/bin/fsdp");
  std::string other = folder("other").string(), bin = (top_ / "usr/bin").string();
  EXPECT_EQ(fsdp_command(binary, top_, other + ":" + bin), "fsdp");
  EXPECT_EQ(fsdp_command(binary, top_, other), "./usr/bin/fsdp");
  program("other/fsdp");  // now the shell finds this one
  EXPECT_EQ(fsdp_command(binary, top_, other + ":" + bin), "./usr/bin/fsdp");
  fs::create_directories(top_ / "here/fsdp");  // a folder isn't a program
  EXPECT_EQ(fsdp_command(binary, top_ / "here", (top_ / "here").string() + ":" + bin), "fsdp");
}

TEST_F(Command, MayBeALinkToTheWrapper) {
  fs::path binary = built("repo", "repo/build/release");
  fs::create_symlink(top_ / "repo/fsdp", folder("bin") / "fsdp");
  EXPECT_EQ(fsdp_command(binary, top_, (top_ / "bin").string()), "fsdp");
}

}  // namespace
}  // namespace fsdp::train
