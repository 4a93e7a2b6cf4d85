#include "cli/explain_text.h"

#include <ostream>
#include <sstream>

#include "base/format.h"
#include "base/table.h"
#include "base/terminal.h"

namespace fsdp::cli {

std::string count_of(int64_t count, const std::string& thing) {
  return formatted("{} {}{}", with_separators(count), thing, count == 1 ? "" : "s");
}

void paragraph(std::ostream& out, const std::string& sentences) {
  std::istringstream words(sentences);
  std::string line, word;
  while (words >> word) {
    if (!line.empty() && line.size() + 1 + word.size() > 92) {
      out << "  " << line << "\n";
      line.clear();
    }
    line += (line.empty() ? "" : " ") + word;
  }
  out << "  " << line << "\n";
}

void heading(std::ostream& out, const std::string& text) {
  out << "\n" << paint(STDOUT, "1", text) << "\n";
}

}  // namespace fsdp::cli
