# An overlay port of this source tree: vcpkg install chevron --overlay-ports=cmake/packaging/vcpkg
# The run side is not in it: it needs PyTorch's LibTorch, which vcpkg does not have; install it with CMake.
get_filename_component(SOURCE_PATH "${CURRENT_PORT_DIR}/../../../.." ABSOLUTE)

set(VCPKG_BUILD_TYPE release)  # headers
vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS -DCHEVRON_RUN=OFF -DCHEVRON_BUILD_TESTS=OFF -DCHEVRON_BUILD_EXAMPLES=OFF -DCHEVRON_BUILD_BENCH=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(PACKAGE_NAME chevron CONFIG_PATH share/cmake/chevron)
vcpkg_fixup_pkgconfig()
set(VCPKG_POLICY_SKIP_COPYRIGHT_CHECK enabled)  # no licence has been chosen yet
file(WRITE "${CURRENT_PACKAGES_DIR}/share/${PORT}/usage" "find_package(chevron CONFIG REQUIRED)\ntarget_link_libraries(main PRIVATE chevron::schedule)\n")
