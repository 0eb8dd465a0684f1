# chevron::compiled: chevron::run as a static library, for programs that would rather link than compile Chevron's functions.
#
#   find_package(chevron REQUIRED COMPONENTS compiled)        # of an installation
#   set(CHEVRON_COMPILED ON)                                  # before add_subdirectory or FetchContent
#   target_link_libraries(mine PRIVATE chevron::compiled)     # in place of chevron::run
#
# The project that asks for it builds it, with its own compiler, flags and LibTorch, when the first program needs it. Its programs
# include headers in which functions are only declared. compiled/interfaces.py, run while CMake configures, derives these headers
# and the library's sources from Chevron's headers. Functions of GPUs (chevron::nccl) are compiled by the programs that use them.

# _chevron_compiled(<headers>): defines the target from the folder of Chevron's headers. Needs chevron::run.
function(_chevron_compiled headers)
  if(TARGET chevron::compiled)
    return()
  endif()
  find_package(Python3 3.9 COMPONENTS Interpreter QUIET)
  if(NOT Python3_Interpreter_FOUND)
    set(chevron_compiled_reason "it needs Python 3.9 or later while CMake configures. Remedy: install python3, or set Python3_EXECUTABLE"
      PARENT_SCOPE)
    return()
  endif()
  set(out "${CMAKE_BINARY_DIR}/chevron-compiled")
  set(script "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/compiled/interfaces.py")
  execute_process(COMMAND "${Python3_EXECUTABLE}" "${script}" "${headers}" "${out}"
    RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(failed)
    set(chevron_compiled_reason "${said}" PARENT_SCOPE)
    return()
  endif()
  file(GLOB_RECURSE read CONFIGURE_DEPENDS "${headers}/chevron/*.hpp")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${script}" ${read})

  add_library(chevron_compiled STATIC EXCLUDE_FROM_ALL)
  add_library(chevron::compiled ALIAS chevron_compiled)
  foreach(source IN ITEMS run processes tools)
    # Each source finds bodies of its own rooms alone, so that each function is compiled once.
    add_library(chevron_compiled_${source} OBJECT EXCLUDE_FROM_ALL "${out}/${source}/${source}.cpp")
    target_include_directories(chevron_compiled_${source} SYSTEM BEFORE PRIVATE "${out}/${source}/bodies" "${out}/interfaces")
    target_link_libraries(chevron_compiled_${source} PRIVATE chevron::run)
    set_target_properties(chevron_compiled_${source} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    # Clang else drops a constructor of complete objects where it equals that of base classes; programs call both.
    target_compile_options(chevron_compiled_${source} PRIVATE
      $<$<CXX_COMPILER_ID:Clang,AppleClang>:SHELL:-Xclang -mno-constructor-aliases>)
    target_sources(chevron_compiled PRIVATE $<TARGET_OBJECTS:chevron_compiled_${source}>)
  endforeach()
  target_include_directories(chevron_compiled SYSTEM BEFORE INTERFACE "${out}/interfaces")
  target_link_libraries(chevron_compiled PUBLIC chevron::run)
  set_target_properties(chevron_compiled PROPERTIES LINKER_LANGUAGE CXX)
endfunction()
