// Where the secret of a run comes from, and which files are refused.
#include "base/secret.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "fsdp/error.h"

namespace fsdp::secret {
namespace {

namespace fs = std::filesystem;

const std::string kGood = "0123456789abcdef0123";

class SecretFile {
 public:
  explicit SecretFile(const std::string& text, mode_t mode = 0600) {
    std::string pattern = fs::temp_directory_path() / "fsdp-secret-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    std::ofstream(path()) << text;
    chmod(path().c_str(), mode);
  }
  ~SecretFile() { fs::remove_all(folder_); }
  std::string path() const { return folder_ / "secret"; }
  fs::path folder() const { return folder_; }

 private:
  fs::path folder_;
};

std::string error_of(const std::string& path) {
  try {
    from_file(path, "--secret-file");
  } catch (const Error& error) {
    EXPECT_NE(error.message().find("--secret-file"), std::string::npos);
    EXPECT_NE(error.hint(), "");
    return error.message();
  }
  return "no error";
}

TEST(Secret, ComesFromTheEnvironmentOrAFile) {
  const SecretFile file("  from the file of this run\n");
  unsetenv("FSDP_SECRET");
  unsetenv("FSDP_SECRET_FILE");
  EXPECT_EQ(of_environment(), "");
  setenv("FSDP_SECRET_FILE", file.path().c_str(), 1);
  EXPECT_EQ(of_environment(), "from the file of this run");
  setenv("FSDP_SECRET", kGood.c_str(), 1);
  EXPECT_EQ(of_environment(), kGood);
  setenv("FSDP_SECRET", "short", 1);
  try {
    of_environment();
    FAIL() << "a short secret";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find("\"short\""), std::string::npos);  // it isn't shown
    EXPECT_NE(error.message().find("FSDP_SECRET"), std::string::npos);
  }
  unsetenv("FSDP_SECRET");
  unsetenv("FSDP_SECRET_FILE");
}

TEST(Secret, AFileThatOthersMayReadIsRefused) {
  for (const mode_t mode : {0644, 0640, 0604, 0620, 0602}) {
    const SecretFile file(kGood, mode);
    EXPECT_NE(error_of(file.path()).find("is open to other users"), std::string::npos);
  }
  EXPECT_EQ(from_file(SecretFile(kGood, 0400).path(), "--secret-file"), kGood);
}

TEST(Secret, OnlyARegularFileOfFittingSizeIsRead) {
  const SecretFile file(kGood);
  EXPECT_NE(error_of(file.folder()).find("it is a directory"), std::string::npos);
  const std::string pipe = file.folder() / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_NE(error_of(pipe).find("it is a FIFO"), std::string::npos);  // and doesn't hang
  EXPECT_NE(error_of(file.path() + "-missing").find("can't be read"), std::string::npos);
  EXPECT_NE(error_of(SecretFile("  \n").path()).find("can be guessed"), std::string::npos);
  EXPECT_NE(error_of(SecretFile(std::string(5000, 'x')).path()).find("more than"),
            std::string::npos);
}

TEST(Secret, RandomOnesDiffer) {
  EXPECT_EQ(random().size(), 64u);
  EXPECT_NE(random(), random());
}

}  // namespace
}  // namespace fsdp::secret
