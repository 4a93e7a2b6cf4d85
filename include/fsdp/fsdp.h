// fsdp.cpp: Fully Sharded Data Parallel for C++. The umbrella; each header can be included alone.
#pragma once

#include "fsdp/communicator.h"
#include "fsdp/error.h"
#include "fsdp/mesh.h"
#include "fsdp/reduce_op.h"
#include "fsdp/version.h"
#include "fsdp/world.h"
