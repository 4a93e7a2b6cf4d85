# The installed package: libraries, headers, the fsdp binary, and find_package(fsdp).
include(CMakePackageConfigHelpers)
install(TARGETS fsdp EXPORT fsdp-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS fsdp_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
foreach(module fsdp_cuda fsdp_mpi)
  if(TARGET ${module})
    install(TARGETS ${module} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  endif()
endforeach()
install(DIRECTORY bench/peers DESTINATION ${CMAKE_INSTALL_DATADIR}/fsdp)
install(DIRECTORY include/fsdp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
set(FSDP_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/fsdp)
install(EXPORT fsdp-targets NAMESPACE fsdp:: DESTINATION ${FSDP_CMAKE_DIR})
configure_package_config_file(cmake/fsdp-config.cmake.in ${PROJECT_BINARY_DIR}/fsdp-config.cmake
  INSTALL_DESTINATION ${FSDP_CMAKE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fsdp-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fsdp-config.cmake ${PROJECT_BINARY_DIR}/fsdp-config-version.cmake
  cmake/LibTorch.cmake DESTINATION ${FSDP_CMAKE_DIR})
