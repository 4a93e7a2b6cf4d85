#include "observe/event_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>

#include "base/file_error.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "fsdp/error.h"

namespace fsdp::observe {
namespace {

[[noreturn]] void fail_to_log(const std::string& file) {
  const int why = errno;
  throw Error(formatted("can't write {}: {}.", file, errno_text(why)), file_hint(why));
}

// The size of the file up to the end of its last complete line.
off_t complete_size(int handle, off_t size) {
  while (size > 0) {
    char last = 0;
    if (::pread(handle, &last, 1, size - 1) != 1 || last == '\n') break;
    --size;
  }
  return size;
}

}  // namespace

EventLog::EventLog(std::string file) : file_(std::move(file)) {
  handle_ = ::open(place_of_file(file_).c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  struct stat status {};
  if (handle_ < 0 || ::fstat(handle_, &status) != 0) fail_to_log(file_);
  if (::ftruncate(handle_, complete_size(handle_, status.st_size)) != 0) fail_to_log(file_);
}

EventLog::~EventLog() {
  ::close(handle_);
}

void EventLog::write(const std::string& event, int64_t step, const nlohmann::ordered_json& facts) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  nlohmann::ordered_json line = {
      {"time", std::round(now.count() * 1e3) / 1e3}, {"step", step}, {"event", event}};
  if (facts.is_object()) line.update(facts);
  // Names and messages from outside may not be UTF-8.
  const std::string text =
      line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  for (size_t done = 0; done < text.size();) {
    const ssize_t some = ::write(handle_, text.data() + done, text.size() - done);
    if (some < 0 && errno == EINTR) continue;
    if (some < 0) fail_to_log(file_);
    done += static_cast<size_t>(some);
  }
}

}  // namespace fsdp::observe
