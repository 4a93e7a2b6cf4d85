// The version of this library; CMakeLists.txt holds the same number, and a test compares them.
#pragma once

#define FSDP_VERSION "0.1.0"
