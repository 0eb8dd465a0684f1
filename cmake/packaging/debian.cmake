# `cpack` in a build folder makes two Debian packages of what was configured and built there: libchevron-dev (headers, CMake package,
# pkg-config; the same on every machine) and chevron-tools (chevron-plan). What links LibTorch is in neither: Debian has none that suits.

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME chevron)
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "")  # each component has a description of its own
set(CPACK_PACKAGE_CONTACT "Chevron's developers <chevron@localhost>")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_COMPONENTS_ALL dev tools)
set(CPACK_STRIP_FILES ON)
set(CPACK_VERBATIM_VARIABLES ON)

set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)

set(CPACK_DEBIAN_DEV_PACKAGE_NAME libchevron-dev)
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEV_PACKAGE_ARCHITECTURE all)
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS "libboost-dev (>= 1.74)")
set(CPACK_DEBIAN_DEV_PACKAGE_RECOMMENDS "nlohmann-json3-dev")  # what reads profiles and writes checkpoints includes it
set(CPACK_DEBIAN_DEV_PACKAGE_SUGGESTS "chevron-tools")
set(CPACK_COMPONENT_DEV_DESCRIPTION "pipeline-parallel schedules in C++20, proved while compiling
Header-only library: schedules of pipeline-parallel training are
described in a few lines, proved by the compiler, and run on LibTorch,
which is needed to train only, and is not among Debian's packages.")

set(CPACK_DEBIAN_TOOLS_PACKAGE_NAME chevron-tools)
set(CPACK_DEBIAN_TOOLS_PACKAGE_SECTION science)
find_program(chevron_shlibdeps dpkg-shlibdeps)
if(chevron_shlibdeps)
  set(CPACK_DEBIAN_TOOLS_PACKAGE_SHLIBDEPS ON)
else()
  set(CPACK_DEBIAN_TOOLS_PACKAGE_DEPENDS libc6)
endif()
set(CPACK_COMPONENT_TOOLS_DESCRIPTION "draws, checks and finds schedules of pipeline-parallel training
chevron-plan shows what a schedule costs in time and memory, says what is
wrong with one in PyTorch's CSV, and finds short ones for measured costs.")

include(CPack)
