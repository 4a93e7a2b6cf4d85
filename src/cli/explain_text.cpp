#include "cli/explain_text.h"

#include <ostream>
#include <sstream>

#include "base/terminal.h"

namespace fsdp::cli {

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
