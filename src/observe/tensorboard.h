// TensorBoard event files: protocol buffers, each framed by its length and two checksums
// (TFRecord). The few messages for scalars and texts are encoded by hand.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace fsdp::observe {

class EventWriter {
 public:
  // Starts a new file in `dir`, which is created if needed. Its name sorts after the existing ones.
  // With `resume_step`, TensorBoard ignores later steps in earlier files.
  explicit EventWriter(const std::string& dir, std::optional<int64_t> resume_step = {});
  ~EventWriter();
  EventWriter(const EventWriter&) = delete;
  EventWriter& operator=(const EventWriter&) = delete;

  void scalar(std::string_view tag, double value, int64_t step);         // stored as float
  void text(std::string_view tag, std::string_view text, int64_t step);  // shown as Markdown
  void flush();  // to the file; throws Error on failure. The destructor also flushes.

  const std::string& file() const { return file_; }

 private:
  void add(std::string_view event);

  std::string file_;
  std::string pending_;
  int handle_ = -1;
};

// CRC-32C of `data`, and its masked form in TFRecord.
uint32_t crc32c(std::string_view data);
uint32_t masked_crc32c(std::string_view data);

}  // namespace fsdp::observe
