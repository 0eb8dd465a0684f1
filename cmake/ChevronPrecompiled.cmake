# LibTorch's headers and Chevron's own, parsed once for all tests and programs: they are most of what one of these includes.

# chevron_precompiled(<target>): a program on chevron::run that is compiled as tests are, since a precompiled header suits nothing that
# is compiled with other flags. Nor does it suit what defines a macro that Chevron's headers look at, as CHEVRON_FAULT_POINTS.
function(chevron_precompiled target)
  if(NOT TARGET chevron-precompiled)
    find_package(nlohmann_json REQUIRED)
    add_library(chevron-precompiled OBJECT EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/cmake/precompiled/run.cpp")
    target_link_libraries(chevron-precompiled PRIVATE chevron::run nlohmann_json::nlohmann_json)
    chevron_compiled_fast(chevron-precompiled)
    chevron_warnings(chevron-precompiled)  # -Wpedantic decides what macros there are, and other macros make it useless
    target_precompile_headers(chevron-precompiled PRIVATE "${PROJECT_SOURCE_DIR}/cmake/precompiled/run.hpp")
    target_compile_options(chevron-precompiled PRIVATE ${chevron_cached_precompiled})
  endif()
  target_precompile_headers(${target} REUSE_FROM chevron-precompiled)
  target_compile_options(${target} PRIVATE ${chevron_cached_precompiled})
endfunction()
