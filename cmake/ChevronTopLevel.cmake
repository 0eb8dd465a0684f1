# Settings of Chevron's own builds, not of projects that use Chevron: defaults, faster tools if they are installed, warnings.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
endif()
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# The paths of g++ and clang, which tests run whichever compiler this build has; empty if a compiler is not installed.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(CHEVRON_GCC "${CMAKE_CXX_COMPILER}")
else()
  find_program(CHEVRON_GCC NAMES g++ g++-12 g++-13 g++-14 g++-15 DOC "g++ for tests of what users compile")
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  set(CHEVRON_CLANG "${CMAKE_CXX_COMPILER}")
else()
  find_program(CHEVRON_CLANG NAMES clang++-16 clang++-17 clang++-18 clang++-19 DOC "clang for tests of what users compile")
endif()
foreach(compiler IN ITEMS CHEVRON_GCC CHEVRON_CLANG)
  if(NOT ${compiler})
    set(${compiler} "")
  endif()
endforeach()

option(CHEVRON_CCACHE "Compile through ccache where it is installed" ON)
find_program(CHEVRON_CCACHE_PROGRAM ccache)
if(CHEVRON_CCACHE AND CHEVRON_CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Precompiled headers and a second clone hit the cache too.
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
    CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 "${CHEVRON_CCACHE_PROGRAM}")
endif()

find_program(CHEVRON_MOLD_PROGRAM mold)
if(CHEVRON_MOLD_PROGRAM AND NOT CMAKE_EXE_LINKER_FLAGS MATCHES "-fuse-ld")
  include(CheckLinkerFlag)
  check_linker_flag(CXX -fuse-ld=mold CHEVRON_COMPILER_TAKES_MOLD)
  if(CHEVRON_COMPILER_TAKES_MOLD)
    add_link_options(-fuse-ld=mold)
  endif()
endif()

# GCC searches its memory for garbage again and again, and finds little: a tenth less time, an eighth more memory.
add_compile_options($<$<CXX_COMPILER_ID:GNU>:--param=ggc-min-heapsize=4000000>)

# chevron_compiled_fast(<target> [<level>]): compiled once and run for seconds, so with as little optimisation as will do (0), and
# with asserts.
function(chevron_compiled_fast target)
  if(CMAKE_BUILD_TYPE STREQUAL "Release")
    set(level 0)
    if(ARGC GREATER 1)
      set(level ${ARGV1})
    endif()
    target_compile_options(${target} PRIVATE -O${level} -UNDEBUG)
  endif()
endfunction()

option(CHEVRON_FAST_PROGRAMS "Compile chevron-train, chevron-finetune, bench-sleep and what of chevron-plan computes little as tests are: a quarter of the time, without optimisation" OFF)

# chevron_precompiled(<target>): a program on chevron::run, or a part of one, with the precompiled header of tests. Flags of
# chevron_compiled_fast and chevron_warnings in this order, else the program gets a header of its own. The header suits nothing that
# defines a macro that Chevron's headers look at, as CHEVRON_FAULT_POINTS.
function(chevron_precompiled target)
  chevron_precompile(${target} FOR_EXECUTABLES HEADERS "${PROJECT_SOURCE_DIR}/cmake/precompiled/run.hpp")
endfunction()

# chevron_training_program(<target>): a program whose run time goes to LibTorch or to sleep, and whose compile time to optimisation.
function(chevron_training_program target)
  if(CHEVRON_FAST_PROGRAMS)
    chevron_compiled_fast(${target})
    chevron_precompiled(${target})
  endif()
endfunction()

# Warnings for a target of ours. Headers of the library count as ours, LibTorch's and Debian's as the system's.
function(chevron_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(${target} PRIVATE -Wno-restrict)  # GCC bug 105651: wrong about std::string's operator+
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    # Templates and macros of the libraries below, spelled in our files.
    target_compile_options(${target} PRIVATE -Wno-gnu-zero-variadic-macro-arguments)
  endif()
endfunction()

# chevron_marker(<out> <file> <word>): the rest of the first line `// word: ...` or `# word: ...` of a source file, else empty.
function(chevron_marker out file word)
  file(STRINGS "${file}" value REGEX "^(//|#) ${word}:" LIMIT_COUNT 1 ENCODING UTF-8)
  string(REGEX REPLACE "^(//|#) ${word}: *" "" value "${value}")
  string(REPLACE "\\;" ";" value "${value}")
  set(${out} "${value}" PARENT_SCOPE)
endfunction()

# chevron_sort_by_marker(<out with> <out without> <word> <source>...): the sources that have this line, and the others, in their order.
function(chevron_sort_by_marker out_with out_without word)
  set(with "")
  set(without "")
  foreach(source IN LISTS ARGN)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
    chevron_marker(value "${source}" ${word})
    if(value)
      list(APPEND with "${source}")
    else()
      list(APPEND without "${source}")
    endif()
  endforeach()
  set(${out_with} "${with}" PARENT_SCOPE)
  set(${out_without} "${without}" PARENT_SCOPE)
endfunction()

# chevron_test_properties(<test> <source> <default timeout in s>): applies the lines in which a source says how its test is run:
#   // timeout: 90       seconds until the test counts as hung
#   // serial: <why>     nothing else may run beside it
#   // waits: <why>      the test mostly waits: it takes half a core, any other test two halves
function(chevron_test_properties test source timeout)
  chevron_marker(own_timeout "${source}" timeout)
  if(own_timeout)
    set(timeout "${own_timeout}")
  endif()
  chevron_marker(serial "${source}" serial)
  set_tests_properties(${test} PROPERTIES TIMEOUT ${timeout} SKIP_RETURN_CODE 77)
  if(serial)
    set_tests_properties(${test} PROPERTIES RUN_SERIAL ON)
  endif()
  # In halves of a core, so that `ctest -j` wants twice the cores.
  chevron_marker(waits "${source}" waits)
  if(waits)
    set_tests_properties(${test} PROPERTIES PROCESSORS 1 COST 100)  # first, so that others run beside it
  else()
    set_tests_properties(${test} PROPERTIES PROCESSORS 2)
  endif()
  # Ranks are threads and processes of their own: LibTorch must not start a team of threads for each.
  set_property(TEST ${test} APPEND PROPERTY ENVIRONMENT
    OMP_NUM_THREADS=1 "CHEVRON_BUILD=${PROJECT_BINARY_DIR}" "CHEVRON_SOURCE=${PROJECT_SOURCE_DIR}"
    "TSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/tsan.supp history_size=4"
    # LibTorch is not instrumented, so a container that crosses into it looks overflown.
    "ASAN_OPTIONS=detect_container_overflow=0:detect_odr_violation=0"
    # LibTorch's log of collectives crashes now and then where several Gloo ranks share a process, as only tests let them.
    TORCH_FR_BUFFER_SIZE=0)
  # A source changed its markers: configure again.
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
endfunction()

include(ChevronBatches)
