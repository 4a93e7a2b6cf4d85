# LibTorch as imported targets, straight from the wheel's include/ and lib/.
#
# The wheel's own find_package(Torch) demands a whole CUDA toolkit even for the CPU libraries; these
# targets don't. Every build needs fsdp::torch. fsdp::torch_cuda exists if the wheel was built for
# CUDA, and is linked only into the CUDA library, which is loaded at run time.
# The installed package includes this file, too. FSDP_LIBTORCH is the path of LibTorch.

# fsdp_torch_version(DIR NAME): sets NAME to the version of the LibTorch in DIR, or to "".
function(fsdp_torch_version dir name)
  set(version "")
  if(EXISTS "${dir}/lib/libtorch_cpu.so" AND EXISTS "${dir}/include/torch/headeronly/version.h")
    file(STRINGS ${dir}/include/torch/headeronly/version.h version
      REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
    string(REGEX REPLACE "[^0-9;]" "" version "${version}")
    list(JOIN version "." version)
  endif()
  set(${name} "${version}" PARENT_SCOPE)
endfunction()

if(NOT FSDP_LIBTORCH)
  include(${CMAKE_CURRENT_LIST_DIR}/SearchLibTorch.cmake)  # the installed package always sets it
endif()
if(NOT EXISTS ${FSDP_LIBTORCH}/lib/libtorch_cpu.so)
  message(FATAL_ERROR "${FSDP_LIBTORCH} isn't LibTorch: it has no lib/libtorch_cpu.so.\n"
    "HINT: set FSDP_LIBTORCH to the folder that holds include/ and lib/.")
endif()
fsdp_torch_version(${FSDP_LIBTORCH} FSDP_TORCH_VERSION)

# The Python wheel keeps CUDA's runtime libraries beside torch/, and libtorch_cpu needs cudart.
get_filename_component(_fsdp_nvidia ${FSDP_LIBTORCH} REALPATH)
file(GLOB _fsdp_nvidia ${_fsdp_nvidia}/../nvidia/*/lib)
set(FSDP_TORCH_RPATH ${FSDP_LIBTORCH}/lib ${_fsdp_nvidia})

if(NOT TARGET fsdp::torch)
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
  # The loader finds libtorch_cpu's own dependencies through its rpath, at run time.
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
