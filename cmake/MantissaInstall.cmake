# cmake --install: the program, all layers as one library for find_package(mantissa), headers, configurations. cpack: DEB and TGZ of the same.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(layers base tensor backend comm autograd precision io data ops nn models train)
list(TRANSFORM layers REPLACE "(.+)" "$<TARGET_OBJECTS:mantissa_\\1>" OUTPUT_VARIABLE objects)
add_library(mantissa_core STATIC ${objects})
set_target_properties(mantissa_core PROPERTIES OUTPUT_NAME mantissa EXPORT_NAME core LINKER_LANGUAGE CXX)
target_compile_features(mantissa_core PUBLIC cxx_std_20)
target_include_directories(mantissa_core INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_libraries(mantissa_core PUBLIC Random123 nlohmann_json::nlohmann_json
                                    PRIVATE spdlog::spdlog OpenMP::OpenMP_CXX Threads::Threads dnnl pcre2 xxhash crypto ${MANTISSA_UCX})

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/mantissa)
install(TARGETS mantissa RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS mantissa_core EXPORT mantissaTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT mantissaTargets NAMESPACE mantissa:: DESTINATION ${package_dir})
install(DIRECTORY include/mantissa DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY configs DESTINATION ${CMAKE_INSTALL_DATADIR}/mantissa)
install(FILES LICENSE README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})

configure_package_config_file(cmake/mantissaConfig.cmake.in ${PROJECT_BINARY_DIR}/mantissaConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/mantissaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/mantissaConfig.cmake ${PROJECT_BINARY_DIR}/mantissaConfigVersion.cmake cmake/MantissaDependencies.cmake
        DESTINATION ${package_dir})

set(CPACK_GENERATOR DEB TGZ)
set(CPACK_PACKAGE_CONTACT "the mantissa maintainers")
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
find_program(DPKG_SHLIBDEPS dpkg-shlibdeps)
mark_as_advanced(DPKG_SHLIBDEPS)
if(DPKG_SHLIBDEPS)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
else()
  set(CPACK_DEBIAN_PACKAGE_DEPENDS "libc6, libstdc++6, libgomp1, libdnnl2, libspdlog1.10, libpcre2-8-0, libssl3, libucx0, libxxhash0")
endif()
include(CPack)
