// Formatting for fsdp explain: counts, paragraphs, headings.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>

namespace fsdp::cli {

void heading(std::ostream& out, const std::string& text);
// Wraps sentences into lines of at most 92 characters, indented by 2.
void paragraph(std::ostream& out, const std::string& sentences);

}  // namespace fsdp::cli
