// Settings of init(), read and checked in one place for init() and fsdp doctor.
#pragma once

#include <chrono>
#include <string>

namespace fsdp::comm {

// The requested backend: `option`, or FSDP_BACKEND, or "auto". Throws an Error if it doesn't exist.
std::string asked_backend(const std::string& option = "");

// `option` if above 0, or FSDP_TIMEOUT (seconds), or 300 s.
std::chrono::milliseconds asked_timeout(std::chrono::milliseconds option = {});

// Whether this machine has a GPU, and whether CUDA_VISIBLE_DEVICES hides all of them.
bool gpu_present();
bool gpus_hidden();

// `option` if above 0, or FSDP_FAKE_WORLD, or `otherwise`.
int asked_fake_size(int option = 0, int otherwise = 1);

}  // namespace fsdp::comm
