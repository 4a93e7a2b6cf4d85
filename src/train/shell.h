// Commands to suggest to the user, ready to be pasted into the shell that started this program.
#pragma once

#include <filesystem>
#include <string>

namespace fsdp::train {

// `text` as one word of a POSIX shell, quoted only if it must be.
std::string shell_word(const std::string& text);

// How to call this program from the working directory: "fsdp" if that is what the shell finds,
// "./fsdp" or another path to the repository's wrapper if the binary is in a build folder, else a
// path to the binary. Quoted for a shell.
std::string fsdp_command();

// The same for any binary and working directory (both absolute), and a value of PATH.
std::string fsdp_command(const std::filesystem::path& binary,
                         const std::filesystem::path& directory, const std::string& search);

}  // namespace fsdp::train
