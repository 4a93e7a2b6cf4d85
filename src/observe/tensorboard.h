// Event files as TensorBoard reads them: records of protocol buffers, each framed by its length and
// two checksums (TFRecord). The few messages that scalars and texts need are written by hand.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace fsdp::observe {

class EventWriter {
 public:
  // Begins a new file in `dir`, which is made if it is missing. Its name sorts after those that are
  // there. With `resume_step`, TensorBoard drops what earlier files say about later steps.
  explicit EventWriter(const std::string& dir, std::optional<int64_t> resume_step = {});
  ~EventWriter();
  EventWriter(const EventWriter&) = delete;
  EventWriter& operator=(const EventWriter&) = delete;

  void scalar(std::string_view tag, double value, int64_t step);         // kept as float
  void text(std::string_view tag, std::string_view text, int64_t step);  // shown as Markdown
  void flush();  // to the file; an Error when that fails. The destructor flushes, too.

  const std::string& file() const { return file_; }

 private:
  void add(std::string_view event);

  std::string file_;
  std::string pending_;
  int handle_ = -1;
};

// CRC-32C of `data`, and the form of it that TFRecord stores.
uint32_t crc32c(std::string_view data);
uint32_t masked_crc32c(std::string_view data);

}  // namespace fsdp::observe
