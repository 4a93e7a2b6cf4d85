#include "base/secret.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/environment.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "base/sha256.h"
#include "fsdp/error.h"

namespace fsdp::secret {
namespace {

constexpr size_t kShortest = 16, kLongest = 4096;  // characters

constexpr const char* kMakeOne =
    "make one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE), and give every node a "
    "copy.";

std::string checked(std::string text, const std::string& source) {
  const char* space = " \t\r\n";
  text.erase(text.find_last_not_of(space) + 1);
  text.erase(0, text.find_first_not_of(space));
  if (text.size() < kShortest)
    throw Error(formatted("{}: a secret of {} characters can be guessed.", source, text.size()),
                kMakeOne);
  return text;
}

}  // namespace

std::string of_environment() {
  if (auto text = environment::text("FSDP_SECRET")) return checked(*text, "FSDP_SECRET");
  if (auto path = environment::text("FSDP_SECRET_FILE"))
    return from_file(*path, "FSDP_SECRET_FILE");
  return "";
}

std::string from_file(const std::string& path, const std::string& source) {
  const auto refuse = [&](const std::string& why, const std::string& hint) {
    throw Error(formatted("{}: \"{}\" {}.", source, path, why), hint);
  };
  const RegularFile file(path);
  struct stat about {};
  if (!file.is_open() || fstat(file.descriptor(), &about) != 0)
    refuse(formatted("can't be read: {}", file.problem()), kMakeOne);
  if (about.st_uid != geteuid() && about.st_uid != 0)
    refuse("belongs to another user", formatted("make a copy of your own: {}", kMakeOne));
  if (about.st_mode & (S_IRWXG | S_IRWXO))
    refuse("is open to other users", formatted("close it: chmod 600 {}", path));
  std::string text(kLongest + 1, '\0');
  const ssize_t got = read(file.descriptor(), text.data(), text.size());
  if (got < 0) refuse(formatted("can't be read: {}", std::strerror(errno)), kMakeOne);
  if (static_cast<size_t>(got) > kLongest)
    refuse(formatted("has more than {} bytes", kLongest), kMakeOne);
  text.resize(static_cast<size_t>(got));
  return checked(std::move(text), formatted("{}: \"{}\"", source, path));
}

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  for (size_t done = 0; done < count;) {
    const ssize_t got = getrandom(bytes.data() + done, count - done, 0);
    if (got < 0 && errno != EINTR)
      throw Error(formatted("the kernel gives no random bytes: {}.", std::strerror(errno)),
                  "does this sandbox forbid the system call getrandom?");
    if (got > 0) done += static_cast<size_t>(got);
  }
  return bytes;
}

std::string random() {
  return to_hex(random_bytes(32));
}

}  // namespace fsdp::secret
