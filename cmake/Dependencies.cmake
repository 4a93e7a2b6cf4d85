# Dependencies besides LibTorch. Header-only libraries and libdeflate are required; liburing, MPI and
# CUDA are optional. CMake prints what it found; `fsdp doctor` shows it later.
find_package(Threads REQUIRED)
foreach(name CLI11 nlohmann_json)
  if(NOT TARGET ${name}::${name})  # a parent project may have it
    find_package(${name} QUIET)
    if(NOT ${name}_FOUND)
      message(FATAL_ERROR "CMake can't find ${name}.\n"
        "HINT: install libcli11-dev and nlohmann-json3-dev, or all that is missing: ./fsdp deps.")
    endif()
  endif()
endforeach()
find_path(FSDP_XXHASH_INCLUDE xxhash.h)  # header only: nothing to link
if(NOT FSDP_XXHASH_INCLUDE)
  message(FATAL_ERROR "CMake can't find xxhash.h.\nHINT: install libxxhash-dev.")
endif()
find_path(FSDP_DEFLATE_INCLUDE libdeflate.h)  # CRC-32 of the records in checkpoints
find_library(FSDP_DEFLATE_LIBRARY deflate)    # shared, or static and position-independent
if(NOT FSDP_DEFLATE_INCLUDE OR NOT FSDP_DEFLATE_LIBRARY)
  message(FATAL_ERROR "CMake can't find libdeflate.\nHINT: install libdeflate-dev.")
endif()
find_path(FSDP_TOML_INCLUDE toml++/toml.h)  # its headers alone, not its library
if(NOT FSDP_TOML_INCLUDE)
  message(FATAL_ERROR "CMake can't find toml++/toml.h.\nHINT: install libtomlplusplus-dev.")
endif()

# State on a disk uses io_uring; without the library it uses threads.
set(FSDP_HAVE_URING OFF)
if(FSDP_URING)
  find_path(FSDP_URING_INCLUDE liburing.h)
  find_library(FSDP_URING_LIBRARY uring)
  if(FSDP_URING_INCLUDE AND FSDP_URING_LIBRARY)
    set(FSDP_HAVE_URING ON)
  endif()
endif()

set(FSDP_HAVE_MPI OFF)
if(FSDP_MPI)
  find_package(MPI QUIET COMPONENTS C)
  if(MPI_C_FOUND)
    set(FSDP_HAVE_MPI ON)
  endif()
endif()

# The CUDA library needs nvcc's toolkit headers, nccl.h and a LibTorch built for CUDA, but no GPU.
set(FSDP_HAVE_CUDA OFF)
set(FSDP_CUDA_WHY "switched off by FSDP_CUDA=OFF")
if(FSDP_CUDA)
  find_program(FSDP_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
  if(NOT FSDP_NVCC)
    set(FSDP_CUDA_WHY "no nvcc")
  elseif(NOT TARGET fsdp::torch_cuda)
    set(FSDP_CUDA_WHY "LibTorch has no libtorch_cuda.so")
  else()
    get_filename_component(_nvcc ${FSDP_NVCC} REALPATH)
    get_filename_component(_cuda ${_nvcc}/../.. ABSOLUTE)
    find_path(FSDP_CUDA_INCLUDE cusparse.h HINTS ${_cuda}/include ${_cuda}/targets/*/include
      $ENV{CUDA_HOME}/include /usr/local/cuda/include)
    find_path(FSDP_NCCL_INCLUDE nccl.h HINTS ${FSDP_CUDA_INCLUDE}
      ${FSDP_LIBTORCH}/../nvidia/nccl/include)
    if(NOT FSDP_CUDA_INCLUDE)
      set(FSDP_CUDA_WHY "no cusparse.h beside ${FSDP_NVCC}")
    elseif(NOT FSDP_NCCL_INCLUDE)
      set(FSDP_CUDA_WHY "no nccl.h")
    else()
      set(FSDP_HAVE_CUDA ON)
      set(FSDP_CUDA_WHY "")
      # Binaries for A100 and H100/H200, and PTX that later GPUs compile themselves.
      if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
        set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
      endif()
      set(CMAKE_CUDA_COMPILER ${FSDP_NVCC})
      set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
      enable_language(CUDA)
      if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 lacks it
        set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      endif()
    endif()
  endif()
endif()

if(FSDP_TESTS)
  find_package(GTest QUIET)
  if(NOT GTest_FOUND)
    # Debian's googletest package, or a staged copy of it, has only the source: build it here.
    find_path(FSDP_GTEST_SOURCE googletest/CMakeLists.txt PATH_SUFFIXES src/googletest
      HINTS ${CMAKE_PREFIX_PATH} /usr)
    if(NOT FSDP_GTEST_SOURCE)
      message(FATAL_ERROR "CMake can't find GoogleTest.\nHINT: install libgtest-dev, or configure with -DFSDP_TESTS=OFF.")
    endif()
    set(INSTALL_GTEST OFF)
    set(BUILD_GMOCK OFF)
    add_subdirectory(${FSDP_GTEST_SOURCE} ${PROJECT_BINARY_DIR}/googletest EXCLUDE_FROM_ALL)
    if(NOT TARGET GTest::gtest)
      add_library(GTest::gtest ALIAS gtest)
    endif()
  endif()
endif()

message(STATUS "LibTorch ${FSDP_TORCH_VERSION} in ${FSDP_LIBTORCH}")
message(STATUS "CUDA library: ${FSDP_HAVE_CUDA} ${FSDP_CUDA_WHY}")
message(STATUS "MPI library: ${FSDP_HAVE_MPI}")
message(STATUS "io_uring (liburing): ${FSDP_HAVE_URING}")
