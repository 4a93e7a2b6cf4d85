// fsdp.cpp: Fully Sharded Data Parallel for C++. The umbrella; each header can be included alone.
#pragma once

#include "fsdp/communicator.h"
#include "fsdp/deferred_init.h"
#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/grad_scaler.h"
#include "fsdp/lr_schedule.h"
#include "fsdp/mesh.h"
#include "fsdp/optim.h"
#include "fsdp/reduce_op.h"
#include "fsdp/shard_info.h"
#include "fsdp/sharding.h"
#include "fsdp/version.h"
#include "fsdp/world.h"
#include "fsdp/wrap.h"
