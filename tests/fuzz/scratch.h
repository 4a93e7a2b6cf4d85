// Files on the disk for targets that read whole directories. An input is the files one after the
// other, each behind a line "=== NAME ===", so that one mutation may change several.
#pragma once

#include <filesystem>
#include <initializer_list>
#include <string>
#include <string_view>

namespace fsdp::fuzz {

// A temporary folder of this process; the driver removes it at the end.
const std::filesystem::path& scratch_folder();
void remove_scratch_folder();

// Empties `folder` and writes those of the named files into it that the input has.
void write_files(const std::filesystem::path& folder, std::string_view input,
                 std::initializer_list<std::string_view> names);

}  // namespace fsdp::fuzz
