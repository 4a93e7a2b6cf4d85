/// @file
/// The version of this library.
#pragma once

/// Major, minor and patch. CMakeLists.txt has the same number; a test compares them.
#define FSDP_VERSION "0.1.0"
