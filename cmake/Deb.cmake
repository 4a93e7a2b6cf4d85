# `cpack --config BUILD/CPackConfig.cmake` makes two Debian packages: fsdp, and fsdp-libtorch with
# the copy of LibTorch that it needs. The tools: file, dpkg-shlibdeps (dpkg-dev).
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_CONTACT "the fsdp.cpp contributors")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL fsdp libtorch)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_COMPRESSION_TYPE zstd)
set(CPACK_DEBIAN_PACKAGE_SECTION science)

# A later fsdp with the same LibTorch needs no new fsdp-libtorch.
set(CPACK_COMPONENT_FSDP_DESCRIPTION
  "The library with its headers and CMake package, the trainer and the launcher.")
set(CPACK_DEBIAN_FSDP_PACKAGE_NAME fsdp)
set(CPACK_DEBIAN_FSDP_PACKAGE_DEPENDS fsdp-libtorch-${FSDP_TORCH_VERSION})
set(CPACK_DEBIAN_FSDP_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${FSDP_TORCH_RPATH})
if(FSDP_HAVE_MPI)
  set(CPACK_DEBIAN_FSDP_PACKAGE_SUGGESTS openmpi-bin)
endif()

set(CPACK_COMPONENT_LIBTORCH_DESCRIPTION
  "LibTorch ${FSDP_TORCH_VERSION}: the libraries and headers of PyTorch that fsdp was built with.")
set(CPACK_DEBIAN_LIBTORCH_PACKAGE_NAME fsdp-libtorch)
set(CPACK_DEBIAN_LIBTORCH_PACKAGE_PROVIDES fsdp-libtorch-${FSDP_TORCH_VERSION})
set(CPACK_DEBIAN_LIBTORCH_PACKAGE_DEPENDS "libc6, libgcc-s1, libstdc++6")
set(CPACK_DEBIAN_LIBTORCH_PACKAGE_SHLIBDEPS OFF)
include(CPack)
