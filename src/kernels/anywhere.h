// FSDP_ANYWHERE: marks a function that C++ and CUDA code call, inlined into both.
#pragma once

#if defined(__CUDACC__)
#define FSDP_ANYWHERE __host__ __device__ __forceinline__
#else
#define FSDP_ANYWHERE [[gnu::always_inline]] inline
#endif
