#include "cli/explain_text.h"

#include <ostream>
#include <sstream>

#include "base/terminal.h"

namespace fsdp::cli {

std::string right(const std::string& text, size_t width) {
  return std::string(width > text.size() ? width - text.size() : 0, ' ') + text;
}

std::string left(const std::string& text, size_t width) {
  return text + std::string(width > text.size() ? width - text.size() : 0, ' ');
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
