# LibTorch's headers, parsed once for all tests and small programs: they are two thirds of what one of these includes.

# chevron_precompiled(<target>): a program on chevron::run that is compiled as tests are, since a precompiled header suits nothing that
# is compiled with other flags.
function(chevron_precompiled target)
  if(NOT TARGET chevron-libtorch)
    add_library(chevron-libtorch OBJECT EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/cmake/precompiled/libtorch.cpp")
    target_link_libraries(chevron-libtorch PRIVATE chevron::run)
    chevron_compiled_fast(chevron-libtorch)
    chevron_warnings(chevron-libtorch)  # -Wpedantic decides what macros there are, and other macros make it useless
    target_precompile_headers(chevron-libtorch PRIVATE "${PROJECT_SOURCE_DIR}/cmake/precompiled/libtorch.hpp")
    target_compile_options(chevron-libtorch PRIVATE ${chevron_cached_precompiled})
  endif()
  target_precompile_headers(${target} REUSE_FROM chevron-libtorch)
  target_compile_options(${target} PRIVATE ${chevron_cached_precompiled})
endfunction()
