# The two packages that cpack -G DEB makes, with the parts that Debian asks for: copyright, changelogs, a long description, stripped
# binaries.
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME mantissa)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION science)
set(CPACK_DEBIAN_RUNTIME_DESCRIPTION "trainer for GPT models in MXFP8 and MXFP4
 Trains GPT models, dense and mixtures of experts, whose weights are MXFP8,
 fake-quantized MXFP4 or high precision by module, on one or several hosts,
 and exports checkpoints that hold what the trainer multiplied by.")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME mantissa-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_DESCRIPTION "trainer for GPT models in MXFP8 and MXFP4: library
 The layers of mantissa (tensors, autograd, precision plans, checkpoints,
 training) as a static library with its headers, for CMake's find_package.")
if(MANTISSA_UCX)
  set(ucx_headers ", libucx-dev")
  set(ucx_library ", libucx0")
endif()
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS
  "libdnnl-dev, libpcre2-dev, librandom123-dev, libspdlog-dev, libssl-dev, libxxhash-dev, nlohmann-json3-dev${ucx_headers}")

find_program(DPKG_SHLIBDEPS dpkg-shlibdeps)
mark_as_advanced(DPKG_SHLIBDEPS)
if(DPKG_SHLIBDEPS)
  set(CPACK_DEBIAN_RUNTIME_PACKAGE_SHLIBDEPS ON)
else()
  set(CPACK_DEBIAN_RUNTIME_PACKAGE_DEPENDS "libc6, libstdc++6, libgomp1, libdnnl2, libspdlog1.10, libpcre2-8-0, libssl3, libxxhash0${ucx_library}")
endif()

# The changelog of the build's own version, as its upstream is its packager.
string(TIMESTAMP debian_date "%a, %d %b %Y %H:%M:%S +0000" UTC)
configure_file(cmake/debian_changelog.in debian/changelog @ONLY)
file(ARCHIVE_CREATE OUTPUT ${PROJECT_BINARY_DIR}/debian/changelog.gz PATHS ${PROJECT_BINARY_DIR}/debian/changelog FORMAT raw COMPRESSION GZip COMPRESSION_LEVEL 9)
set(debian_documents ${PROJECT_BINARY_DIR}/debian/changelog.gz cmake/copyright)
install(FILES ${debian_documents} DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/mantissa)
install(FILES ${debian_documents} DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/mantissa-dev COMPONENT development)
