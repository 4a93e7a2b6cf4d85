# LibTorch as imported targets, straight from the wheel's include/ and lib/.
#
# The wheel's own find_package(Torch) demands a whole CUDA toolkit even for the CPU libraries; these
# targets do not. fsdp::torch is what every build needs; fsdp::torch_cuda exists where the wheel was
# built for CUDA, and is linked only into the CUDA library, which is loaded at run time.
# Installed beside the package and included from there too (FSDP_LIBTORCH says where LibTorch is).
if(NOT FSDP_LIBTORCH)
  message(FATAL_ERROR "FSDP_LIBTORCH is not set.\n"
    "HINT: ./fsdp finds or fetches LibTorch and sets it; by hand: "
    "-DFSDP_LIBTORCH=$(python3 -c 'import torch; print(torch.__path__[0])')")
endif()
if(NOT EXISTS ${FSDP_LIBTORCH}/lib/libtorch_cpu.so)
  message(FATAL_ERROR "${FSDP_LIBTORCH} is no LibTorch: it has no lib/libtorch_cpu.so.\n"
    "HINT: give the folder that holds include/ and lib/.")
endif()
file(STRINGS ${FSDP_LIBTORCH}/include/torch/headeronly/version.h _fsdp_version
  REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
string(REGEX REPLACE "[^0-9;]" "" _fsdp_version "${_fsdp_version}")
list(JOIN _fsdp_version "." FSDP_TORCH_VERSION)

if(NOT TARGET fsdp::torch)
  # The Python wheel keeps CUDA's runtime libraries beside torch/, and libtorch_cpu needs cudart.
  set(FSDP_TORCH_RPATH ${FSDP_LIBTORCH}/lib)
  file(GLOB _fsdp_nvidia ${FSDP_LIBTORCH}/../nvidia/*/lib)
  list(APPEND FSDP_TORCH_RPATH ${_fsdp_nvidia})

  foreach(name c10 torch_cpu)
    add_library(fsdp::${name} SHARED IMPORTED)
    set_target_properties(fsdp::${name} PROPERTIES
      IMPORTED_LOCATION ${FSDP_LIBTORCH}/lib/lib${name}.so)
  endforeach()
  add_library(fsdp::torch INTERFACE IMPORTED)
  target_include_directories(fsdp::torch SYSTEM INTERFACE
    ${FSDP_LIBTORCH}/include ${FSDP_LIBTORCH}/include/torch/csrc/api/include)
  target_link_libraries(fsdp::torch INTERFACE fsdp::torch_cpu fsdp::c10)
  target_compile_definitions(fsdp::torch INTERFACE USE_DISTRIBUTED USE_C10D FMT_HEADER_ONLY=1)
  # Libraries that libtorch_cpu itself needs are found through its own rpath, at run time.
  target_link_options(fsdp::torch INTERFACE -Wl,--allow-shlib-undefined)

  if(EXISTS ${FSDP_LIBTORCH}/lib/libtorch_cuda.so)
    foreach(name c10_cuda torch_cuda)
      add_library(fsdp::lib${name} SHARED IMPORTED)
      set_target_properties(fsdp::lib${name} PROPERTIES
        IMPORTED_LOCATION ${FSDP_LIBTORCH}/lib/lib${name}.so)
    endforeach()
    add_library(fsdp::torch_cuda INTERFACE IMPORTED)
    target_link_libraries(fsdp::torch_cuda INTERFACE fsdp::torch fsdp::libtorch_cuda fsdp::libc10_cuda)
  endif()
endif()
