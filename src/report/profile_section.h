// A profile as a part of a page: where the time of a step went, by family, unit and kernel, with a
// timeline. The JSON is what observe/step_time.h makes, and what profile.json holds.
#pragma once

#include "report/page.h"

namespace fsdp::report {

// Parts that the JSON lacks are left out.
void add_profile(Page& page, const Json& profile);

// The page of `fsdp train --profile`.
Page profile_page(const std::string& run, const Json& profile);

}  // namespace fsdp::report
