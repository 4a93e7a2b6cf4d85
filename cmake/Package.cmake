# The installed package: libraries, headers, programs, and find_package(fsdp).
#
# Installed files look for LibTorch in PREFIX/lib/fsdp/torch, so they name no path of the machine
# that built them. `cmake --install` makes that a link to the LibTorch of the build. The component
# libtorch, installed only when asked for, puts a copy there. The Debian packages hold the components
# fsdp and libtorch, but not `local`, which is of use only on the machine of the build.
include(CMakePackageConfigHelpers)
set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME fsdp)
get_filename_component(_fsdp_torch ${FSDP_LIBTORCH} REALPATH)

# Without our CUDA library, or without cuDNN (./fsdp leaves it out on machines without a GPU), CUDA
# can't be used with the copy.
file(GLOB _fsdp_cudnn ${_fsdp_torch}/../nvidia/cudnn/lib/libcudnn.so*
  ${_fsdp_torch}/lib/libcudnn.so*)
if(FSDP_HAVE_CUDA AND _fsdp_cudnn)
  set(_fsdp_cuda_component fsdp)
else()
  set(_fsdp_cuda_component local)
endif()

install(TARGETS fsdp EXPORT fsdp-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS fsdp_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS fsdp_bench RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} OPTIONAL)  # if built
if(TARGET fsdp_mpi)
  install(TARGETS fsdp_mpi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
if(TARGET fsdp_cuda)
  install(TARGETS fsdp_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    COMPONENT ${_fsdp_cuda_component})
endif()
install(DIRECTORY bench/peers DESTINATION ${CMAKE_INSTALL_DATADIR}/fsdp)
install(FILES bench/rows.json DESTINATION ${CMAKE_INSTALL_DATADIR}/fsdp)
install(DIRECTORY include/fsdp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/fsdp RENAME copyright)
set(FSDP_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/fsdp)
set(FSDP_TORCH_DIR ${CMAKE_INSTALL_LIBDIR}/fsdp/torch)
install(EXPORT fsdp-targets NAMESPACE fsdp:: DESTINATION ${FSDP_CMAKE_DIR})
configure_package_config_file(cmake/fsdp-config.cmake.in ${PROJECT_BINARY_DIR}/fsdp-config.cmake
  INSTALL_DESTINATION ${FSDP_CMAKE_DIR} PATH_VARS FSDP_TORCH_DIR)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fsdp-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fsdp-config.cmake
  ${PROJECT_BINARY_DIR}/fsdp-config-version.cmake cmake/LibTorch.cmake
  DESTINATION ${FSDP_CMAKE_DIR})

# CUDA's libraries are in ../nvidia, seen from LibTorch behind the link as well as from the copy.
set(_fsdp_rpath fsdp/torch/lib)
file(GLOB _fsdp_nvidia RELATIVE ${_fsdp_torch}/.. ${_fsdp_torch}/../nvidia/*/lib)
list(TRANSFORM _fsdp_nvidia PREPEND fsdp/torch/../ OUTPUT_VARIABLE _fsdp_nvidia_rpath)
list(APPEND _fsdp_rpath ${_fsdp_nvidia_rpath})
list(TRANSFORM _fsdp_rpath PREPEND $ORIGIN/ OUTPUT_VARIABLE _fsdp_library_rpath)
list(TRANSFORM _fsdp_rpath PREPEND $ORIGIN/../${CMAKE_INSTALL_LIBDIR}/
  OUTPUT_VARIABLE _fsdp_program_rpath)
foreach(target fsdp fsdp_cuda fsdp_mpi)
  if(TARGET ${target})
    set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN;${_fsdp_library_rpath}")
  endif()
endforeach()
set_target_properties(fsdp_cli fsdp_bench PROPERTIES
  INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${_fsdp_program_rpath}")

# The link. A copy that is there stays.
file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/package)
file(CREATE_LINK ${_fsdp_torch} ${PROJECT_BINARY_DIR}/package/torch SYMBOLIC)
install(CODE "
  set(torch \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${FSDP_TORCH_DIR}\")
  if(IS_SYMLINK \"\${torch}\" OR NOT EXISTS \"\${torch}\")
    file(INSTALL ${PROJECT_BINARY_DIR}/package/torch
      DESTINATION \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/fsdp\")
  endif()" COMPONENT local)

# The copy, in the layout of the wheel, whose libraries find each other by it. It takes the place of
# the link, which would lead it into the LibTorch of the build.
install(CODE "
  if(IS_SYMLINK \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${FSDP_TORCH_DIR}\")
    file(REMOVE \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${FSDP_TORCH_DIR}\")
  endif()" COMPONENT libtorch EXCLUDE_FROM_ALL)
set(_fsdp_unused "lib(torch_python|shm)")
set(_fsdp_nvidia_files FILES_MATCHING REGEX "\\.so[.0-9]*$")
if(_fsdp_cuda_component STREQUAL local)
  set(_fsdp_unused "lib(torch_python|shm|torch_cuda|c10_cuda|torch_nvshmem|caffe2_nvrtc|torch\\.)")
  set(_fsdp_nvidia_files FILES_MATCHING REGEX "/lib(cudart|cupti)\\.so[.0-9]*$")
endif()
set(_fsdp_copy COMPONENT libtorch EXCLUDE_FROM_ALL)
install(DIRECTORY ${_fsdp_torch}/include DESTINATION ${FSDP_TORCH_DIR} ${_fsdp_copy})
install(DIRECTORY ${_fsdp_torch}/lib DESTINATION ${FSDP_TORCH_DIR} ${_fsdp_copy}
  FILES_MATCHING REGEX "/lib[^/]*\\.so[.0-9]*$" REGEX "/${_fsdp_unused}" EXCLUDE)
install(FILES ${_fsdp_torch}/version.py DESTINATION ${FSDP_TORCH_DIR} ${_fsdp_copy} OPTIONAL)
foreach(folder IN LISTS _fsdp_nvidia)
  install(DIRECTORY ${_fsdp_torch}/../${folder}/ ${_fsdp_copy}
    DESTINATION ${CMAKE_INSTALL_LIBDIR}/fsdp/${folder} ${_fsdp_nvidia_files})
endforeach()
file(GLOB _fsdp_licenses ${_fsdp_torch}/../torch-*.dist-info/licenses
  ${_fsdp_torch}/../nvidia_*.dist-info/licenses)
foreach(folder IN LISTS _fsdp_licenses)
  string(REGEX REPLACE ".*/([^/-]+)-[^/]*/licenses$" "\\1" name ${folder})
  install(DIRECTORY ${folder}/ ${_fsdp_copy}
    DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/fsdp-libtorch/${name})
endforeach()

if(PROJECT_IS_TOP_LEVEL)
  include(cmake/Deb.cmake)
endif()
