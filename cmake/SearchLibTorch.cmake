# Sets FSDP_LIBTORCH where the user didn't: to the LibTorch of a parent project that called
# find_package(Torch), else to that of python3, else to the one that ./fsdp keeps in its cache.
# Its version must be the one that ./fsdp names.
file(STRINGS ${PROJECT_SOURCE_DIR}/fsdp _fsdp_wanted REGEX "^torch=[0-9.]+$")
string(REPLACE "torch=" "" _fsdp_wanted "${_fsdp_wanted}")
set(_fsdp_instead "")  # what python3 has instead

if(TORCH_INSTALL_PREFIX)
  # Two LibTorches in one program would be worse than an error.
  fsdp_torch_version(${TORCH_INSTALL_PREFIX} _fsdp_version)
  if(NOT _fsdp_version VERSION_EQUAL _fsdp_wanted)
    message(FATAL_ERROR "This project's find_package(Torch) found LibTorch ${_fsdp_version} in "
      "${TORCH_INSTALL_PREFIX}; fsdp needs ${_fsdp_wanted}.\nHINT: let find_package(Torch) find "
      "LibTorch ${_fsdp_wanted}, or pass -DFSDP_LIBTORCH=${TORCH_INSTALL_PREFIX} to try this one.")
  endif()
  set(FSDP_LIBTORCH ${TORCH_INSTALL_PREFIX})
  return()
endif()

find_program(_fsdp_python python3 NO_CACHE)
if(_fsdp_python)
  # Importing torch would take seconds. In / no folder can be mistaken for a package.
  execute_process(WORKING_DIRECTORY / COMMAND ${_fsdp_python} -c
    "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE _fsdp_torch OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(_fsdp_torch)
    fsdp_torch_version(${_fsdp_torch} _fsdp_version)
    if(_fsdp_version VERSION_EQUAL _fsdp_wanted)
      set(FSDP_LIBTORCH ${_fsdp_torch})
      return()
    endif()
    set(_fsdp_instead " (python3 has ${_fsdp_version})")
  endif()
endif()

set(_fsdp_cache "$ENV{XDG_CACHE_HOME}")
if(NOT _fsdp_cache)
  set(_fsdp_cache "$ENV{HOME}/.cache")
endif()
foreach(_fsdp_flavour cuda cpu)
  set(_fsdp_torch ${_fsdp_cache}/fsdp.cpp/libtorch-${_fsdp_wanted}-${_fsdp_flavour}/torch)
  fsdp_torch_version(${_fsdp_torch} _fsdp_version)
  if(_fsdp_version VERSION_EQUAL _fsdp_wanted)
    set(FSDP_LIBTORCH ${_fsdp_torch})
    return()
  endif()
endforeach()

message(FATAL_ERROR "FSDP_LIBTORCH is not set, and there is no LibTorch ${_fsdp_wanted} in python3 "
  "or in the cache of ./fsdp${_fsdp_instead}.\n"
  "HINT: ${PROJECT_SOURCE_DIR}/fsdp deps fetches it; another copy: "
  "-DFSDP_LIBTORCH=$(python3 -c 'import torch; print(torch.__path__[0])')")
