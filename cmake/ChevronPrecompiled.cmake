# LibTorch's headers and Chevron's own, parsed once for all tests and programs: they are most of what one of these includes.
#
# Clang also compiles their functions once, into an object that all these programs are linked with: else each file compiles anew what
# it uses of them, in as much time as all else of it takes. The linker drops what a program does not use, and so never asks for what
# LibTorch's headers call and its libraries lack.

# chevron_precompiled(<target>): a program on chevron::run that is compiled as tests are, since a precompiled header suits nothing that
# is compiled with other flags. Nor does it suit what defines a macro that Chevron's headers look at, as CHEVRON_FAULT_POINTS.
function(chevron_precompiled target)
  set(functions "${PROJECT_BINARY_DIR}/chevron-precompiled.o")
  if(NOT TARGET chevron-precompiled)
    find_package(nlohmann_json REQUIRED)
    add_library(chevron-precompiled OBJECT EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/cmake/precompiled/run.cpp")
    target_link_libraries(chevron-precompiled PRIVATE chevron::run nlohmann_json::nlohmann_json)
    chevron_compiled_fast(chevron-precompiled)
    chevron_warnings(chevron-precompiled)  # -Wpedantic decides what macros there are, and other macros make it useless
    target_precompile_headers(chevron-precompiled PRIVATE "${PROJECT_SOURCE_DIR}/cmake/precompiled/run.hpp")
    target_compile_options(chevron-precompiled PRIVATE ${chevron_cached_precompiled})
    if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
      target_compile_options(chevron-precompiled PRIVATE "SHELL:-Xclang -fmodules-codegen")
      set(header "${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/chevron-precompiled.dir/cmake_pch.hxx.pch")
      separate_arguments(flags UNIX_COMMAND "${CMAKE_CXX_FLAGS}")
      add_custom_command(OUTPUT "${functions}"
        COMMAND "${CMAKE_CXX_COMPILER}" ${flags} -O0 -c "${header}" -o "${functions}"
        DEPENDS "${header}" COMMENT "Compiling the functions of the precompiled header" VERBATIM)
      add_custom_target(chevron-precompiled-functions DEPENDS "${functions}")
    endif()
  endif()
  target_precompile_headers(${target} REUSE_FROM chevron-precompiled)
  target_compile_options(${target} PRIVATE ${chevron_cached_precompiled})
  get_target_property(type ${target} TYPE)
  if(TARGET chevron-precompiled-functions AND type STREQUAL "EXECUTABLE")
    target_link_libraries(${target} PRIVATE "${functions}")
    target_link_options(${target} PRIVATE LINKER:--gc-sections)
    add_dependencies(${target} chevron-precompiled-functions)
  endif()
endfunction()
