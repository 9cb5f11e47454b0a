# cmake --install: the program, all layers as one library for find_package(mantissa), headers, configurations
# with the texts that they train on. cpack: a TGZ of it, and DEBs of the program (component runtime) and of the rest (development).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(layers ${MANTISSA_LAYERS})
list(TRANSFORM layers REPLACE "(.+)" "$<TARGET_OBJECTS:mantissa_\\1>" OUTPUT_VARIABLE objects)
add_library(mantissa_core STATIC ${objects} ${MANTISSA_CUDA_OBJECTS})
set_target_properties(mantissa_core PROPERTIES OUTPUT_NAME mantissa EXPORT_NAME core LINKER_LANGUAGE CXX)
target_compile_features(mantissa_core PUBLIC cxx_std_20)
target_include_directories(mantissa_core INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_libraries(mantissa_core PUBLIC Random123 nlohmann_json::nlohmann_json
                                    PRIVATE spdlog::spdlog OpenMP::OpenMP_CXX Threads::Threads dnnl pcre2 xxhash crypto ${MANTISSA_UCX}
                                            ${MANTISSA_CUDART} ${CMAKE_DL_LIBS})

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/mantissa)
set(shared_dir ${CMAKE_INSTALL_DATADIR}/mantissa)
set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME runtime)
install(TARGETS mantissa RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS mantissa_core EXPORT mantissaTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
install(EXPORT mantissaTargets NAMESPACE mantissa:: DESTINATION ${package_dir} COMPONENT development)
install(DIRECTORY include/mantissa DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)
install(DIRECTORY configs src tools include DESTINATION ${shared_dir})  # quickstart.json and those of several ranks train on these sources
install(FILES README.md DESTINATION ${shared_dir})
install(FILES LICENSE README.md CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY docs DESTINATION ${CMAKE_INSTALL_DOCDIR})  # the README links to these pages
install(FILES cmake/completion/mantissa DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)

configure_package_config_file(cmake/mantissaConfig.cmake.in ${PROJECT_BINARY_DIR}/mantissaConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/mantissaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/mantissaConfig.cmake ${PROJECT_BINARY_DIR}/mantissaConfigVersion.cmake cmake/MantissaDependencies.cmake
        DESTINATION ${package_dir} COMPONENT development)

find_program(HELP2MAN help2man)
mark_as_advanced(HELP2MAN)
if(HELP2MAN)
  add_custom_target(man_pages ALL DEPENDS ${PROJECT_BINARY_DIR}/man/mantissa.1.gz)
  add_custom_command(OUTPUT ${PROJECT_BINARY_DIR}/man/mantissa.1.gz DEPENDS mantissa cmake/man_pages.cmake VERBATIM
    COMMAND ${CMAKE_COMMAND} -DPROGRAM=$<TARGET_FILE:mantissa> -DHELP2MAN=${HELP2MAN} -DVERSION=${PROJECT_VERSION}
            -DOUTPUT=${PROJECT_BINARY_DIR}/man -P ${PROJECT_SOURCE_DIR}/cmake/man_pages.cmake)
  install(DIRECTORY ${PROJECT_BINARY_DIR}/man/ DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
endif()

set(CPACK_PACKAGE_CONTACT "the mantissa maintainers <maintainers@mantissa.invalid>")
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_GENERATOR DEB TGZ)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL runtime development)
include(MantissaDebian)
include(CPack)
