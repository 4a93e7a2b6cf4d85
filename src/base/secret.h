// The secret of a run: what its processes know and nobody else. Across hosts they prove it to each
// other (base/handshake.h). It is never printed, logged or stored.
#pragma once

#include <string>

#include "base/namespace.h"

namespace fsdp::secret {

// FSDP_SECRET, else the text of the file FSDP_SECRET_FILE; "": neither is set. Throws an Error for
// a secret that is too short and for a file that others may read.
std::string of_environment();

// The text of a file without the space around it. `source` names the flag or variable in errors.
std::string from_file(const std::string& path, const std::string& source);

std::string random();                    // a new secret: 32 random bytes, in hexadecimal digits
std::string random_bytes(size_t count);  // from the kernel

}  // namespace fsdp::secret
