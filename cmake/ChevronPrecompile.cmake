# chevron_precompile(<target> [HEADERS <header>...] [WITHOUT_MACROS <macro>...] [FOR_EXECUTABLES])
#
# Compiles the target's C++ files with a precompiled header of <chevron/run.hpp>, <chevron/schedule.hpp>, LibTorch's usual
# modules and optimizers (precompiled/training.hpp), and HEADERS. Targets that are compiled with equal flags share one header;
# the first target with other flags gets another header, and CMake prints the difference. C and CUDA files are compiled
# without it.
#
# Clang also compiles functions of the header once, into an object file that executables are linked with: else each source
# file compiles the functions that it uses. The linker of an executable drops unused functions, of which some call what
# LibTorch declares and does not define. The linker of a shared library keeps all, so libraries get a header without such an
# object file. FOR_EXECUTABLES promises that only executables link an object or static library: linking it then adds the
# object file to them.
#
# HEADERS are found in the include folders of the first target that shares the header. WITHOUT_MACROS names macros that no
# precompiled header reads: targets that differ in these alone share a header.
#
# The call stands in the CMakeLists.txt that creates the target, before or after its flags and libraries are set: these are
# read at the end of that file. -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON turns all of it off.
function(chevron_precompile target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "FOR_EXECUTABLES" "" "HEADERS;WITHOUT_MACROS")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "chevron_precompile(${target}): unknown argument '${arg_UNPARSED_ARGUMENTS}'. Remedy: name "
                        "headers after HEADERS, macros after WITHOUT_MACROS")
  endif()
  if(NOT TARGET ${target})
    message(FATAL_ERROR "chevron_precompile(${target}): no such target. Remedy: call it after add_executable or add_library")
  endif()
  get_target_property(type ${target} TYPE)
  get_target_property(imported ${target} IMPORTED)
  if(imported OR NOT type MATCHES "^(EXECUTABLE|OBJECT_LIBRARY|STATIC_LIBRARY|SHARED_LIBRARY|MODULE_LIBRARY)$")
    message(FATAL_ERROR "chevron_precompile(${target}): the target compiles no files, so there is nothing to "
                        "precompile for. Remedy: name the executables and libraries that are compiled with it")
  endif()
  get_target_property(folder ${target} SOURCE_DIR)
  if(NOT folder STREQUAL CMAKE_CURRENT_SOURCE_DIR)
    message(FATAL_ERROR "chevron_precompile(${target}): the target is created in ${folder}, whose flags are not known "
                        "here. Remedy: call it in the CMakeLists.txt of that folder")
  endif()
  if(arg_FOR_EXECUTABLES AND type MATCHES "^(SHARED|MODULE)_LIBRARY$")
    message(FATAL_ERROR "chevron_precompile(${target} FOR_EXECUTABLES): the target is itself linked as a shared "
                        "library. Remedy: leave out FOR_EXECUTABLES")
  endif()
  # A deferred call expands its arguments at the end of the file, so their values are written out.
  cmake_language(EVAL CODE "cmake_language(DEFER CALL _chevron_precompile_now
    [[${target}]] [[${arg_FOR_EXECUTABLES}]] [[${arg_HEADERS}]] [[${arg_WITHOUT_MACROS}]])")
endfunction()

# Appends a target's property, where it is set, to a list of the caller.
macro(_chevron_append list target property)
  get_target_property(value "${target}" ${property})
  if(value)
    list(APPEND ${list} ${value})
  endif()
endmacro()

# Evaluates generator expressions on constants, as $<$<BOOL:OFF>:X>, in a list of the caller; empty entries are removed.
function(_chevron_fold list)
  set(folded "")
  foreach(value IN LISTS ${list})
    while(value MATCHES "\\$<BOOL:([^$<>]*)>")
      set(truth 0)
      if("${CMAKE_MATCH_1}")
        set(truth 1)
      endif()
      string(REPLACE "${CMAKE_MATCH_0}" "${truth}" value "${value}")
    endwhile()
    string(REPLACE "$<NOT:0>" 1 value "${value}")
    string(REPLACE "$<NOT:1>" 0 value "${value}")
    string(REGEX REPLACE "^\\$<0:.*>$" "" value "${value}")
    string(REGEX REPLACE "^\\$<1:(.*)>$" "\\1" value "${value}")
    if(NOT value STREQUAL "")
      list(APPEND folded "${value}")
    endif()
  endforeach()
  set(${list} ${folded} PARENT_SCOPE)
endfunction()

# Appends usage requirements of libraries, and of the libraries that they link, to `flags`, `features`, `definitions`,
# `independent` and `system` (folders of imported libraries) of the caller, and the libraries to `seen`.
macro(_chevron_interface_flags libraries)
  set(pending ${libraries})
  while(pending)
    list(POP_FRONT pending library)
    if(library MATCHES "^\\$<(LINK_ONLY|TARGET_OBJECTS):" OR library IN_LIST seen)
      continue()
    endif()
    list(APPEND seen "${library}")
    if(NOT TARGET "${library}")
      if(library MATCHES "\\$<")
        list(APPEND flags "${library}")
      endif()
      continue()
    endif()
    _chevron_append(flags "${library}" INTERFACE_COMPILE_OPTIONS)
    _chevron_append(features "${library}" INTERFACE_COMPILE_FEATURES)
    _chevron_append(definitions "${library}" INTERFACE_COMPILE_DEFINITIONS)
    _chevron_append(independent "${library}" INTERFACE_POSITION_INDEPENDENT_CODE)
    get_target_property(value "${library}" IMPORTED)
    if(value)
      list(APPEND system "$<TARGET_PROPERTY:${library},INTERFACE_INCLUDE_DIRECTORIES>")
    endif()
    _chevron_append(pending "${library}" INTERFACE_LINK_LIBRARIES)
  endwhile()
endmacro()

# Finds or makes the header that suits the target's flags, and lets the target use it.
function(_chevron_precompile_now target for_executables headers without_macros)
  get_target_property(disabled ${target} DISABLE_PRECOMPILE_HEADERS)
  if(disabled)
    return()
  endif()
  get_target_property(own ${target} PRECOMPILE_HEADERS)
  get_target_property(reused ${target} PRECOMPILE_HEADERS_REUSE_FROM)
  if(reused MATCHES "^chevron-precompiled-")
    message(FATAL_ERROR "chevron_precompile(${target}): the target has been named before. Remedy: one call for each target")
  endif()
  if(own OR reused)
    message(FATAL_ERROR "chevron_precompile(${target}): the target has precompiled headers of its own. Remedy: name "
                        "them after HEADERS in place of target_precompile_headers")
  endif()
  get_target_property(type ${target} TYPE)
  get_target_property(libraries ${target} LINK_LIBRARIES)
  list(APPEND without_macros USE_C10D_NCCL)  # chevron::nccl's, for LibTorch's headers of NCCL
  list(JOIN without_macros "|" macros)

  # ---- Flags that the compiler compares between a header and a file that uses it.
  separate_arguments(flags UNIX_COMMAND "${CMAKE_CXX_FLAGS}")
  foreach(config IN LISTS CMAKE_BUILD_TYPE CMAKE_CONFIGURATION_TYPES)
    string(TOUPPER "${config}" upper)
    separate_arguments(value UNIX_COMMAND "${CMAKE_CXX_FLAGS_${upper}}")
    list(TRANSFORM value PREPEND "${config}: ")
    list(APPEND flags ${value})
  endforeach()
  foreach(list IN ITEMS features definitions independent system seen)
    set(${list} "")
  endforeach()
  _chevron_append(flags ${target} COMPILE_FLAGS)
  _chevron_append(flags ${target} COMPILE_OPTIONS)
  _chevron_append(features ${target} COMPILE_FEATURES)
  _chevron_append(definitions ${target} COMPILE_DEFINITIONS)
  if(libraries)
    _chevron_interface_flags("${libraries}")
  endif()
  list(FILTER features INCLUDE REGEX "cxx_std")
  list(SORT features ORDER DESCENDING)
  if(features)
    list(GET features 0 newest)
    list(APPEND flags "${newest}")
  endif()
  if(NOT "chevron_run" IN_LIST seen AND NOT "chevron::run" IN_LIST seen)
    message(FATAL_ERROR "chevron_precompile(${target}): the target does not link chevron::run, whose headers would be "
                        "precompiled. Remedy: target_link_libraries(${target} PRIVATE chevron::run)")
  endif()
  list(TRANSFORM definitions REPLACE "^-D" "")
  list(FILTER definitions EXCLUDE REGEX "^(${macros})(=|$)")
  _chevron_fold(definitions)
  _chevron_fold(flags)
  list(SORT definitions)
  list(REMOVE_DUPLICATES definitions)
  list(TRANSFORM definitions PREPEND -D)
  list(APPEND flags ${definitions})
  set(copied CXX_STANDARD CXX_STANDARD_REQUIRED CXX_EXTENSIONS CXX_VISIBILITY_PRESET VISIBILITY_INLINES_HIDDEN
    INTERPROCEDURAL_OPTIMIZATION)
  foreach(property IN LISTS copied)
    get_target_property(${property} ${target} ${property})
    if(NOT ${property} STREQUAL "${property}-NOTFOUND")
      list(APPEND flags "${property}=${${property}}")
    endif()
  endforeach()
  # An object library has -fPIC where an executable has -fPIE, so the flag is named here and not left to CMake.
  get_target_property(value ${target} POSITION_INDEPENDENT_CODE)
  if(value MATCHES "-NOTFOUND$")
    set(value OFF)
    if(type MATCHES "^(SHARED|MODULE)_LIBRARY$" OR independent)
      set(value ON)
    endif()
  endif()
  set(placed "")
  if(value)
    set(placed ${CMAKE_CXX_COMPILE_OPTIONS_PIC})
    if(type STREQUAL "EXECUTABLE")
      set(placed ${CMAKE_CXX_COMPILE_OPTIONS_PIE})
    endif()
  endif()
  list(APPEND flags ${placed})
  list(REMOVE_DUPLICATES flags)  # as CMake does
  foreach(header IN LISTS headers)
    list(APPEND flags "header ${header}")
  endforeach()
  set(compiles_functions OFF)
  get_target_property(exports ${target} ENABLE_EXPORTS)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND (type STREQUAL "EXECUTABLE" OR for_executables) AND NOT exports)
    set(compiles_functions ON)
    list(APPEND flags "functions compiled once")
  endif()

  # ---- The header: of an object library, so that no target waits for another one's files.
  string(SHA256 name "${flags}")
  string(SUBSTRING "${name}" 0 8 name)
  set(name chevron-precompiled-${name})
  set(cached $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>  # for ccache
    "$<$<COMPILE_LANG_AND_ID:CXX,Clang>:SHELL:-Xclang -fno-pch-timestamp>")
  if(NOT TARGET ${name})
    get_property(first GLOBAL PROPERTY _chevron_precompile_first)
    if(first)
      get_property(others GLOBAL PROPERTY _chevron_precompile_flags)
      set(more ${flags})
      list(REMOVE_ITEM more ${others})
      list(REMOVE_ITEM others ${flags})
      list(TRANSFORM more PREPEND "with ")
      list(TRANSFORM others PREPEND "without ")
      string(JOIN ", " difference ${more} ${others})
      if(difference STREQUAL "")
        set(difference "in another order")
      endif()
      message(STATUS "chevron: another precompiled header for ${target}, since its flags differ from those of "
                     "${first}: ${difference}")
    else()
      set_property(GLOBAL PROPERTY _chevron_precompile_first "${target}")
      set_property(GLOBAL PROPERTY _chevron_precompile_flags "${flags}")
    endif()
    set(here "${CMAKE_CURRENT_FUNCTION_LIST_DIR}")
    add_library(${name} OBJECT EXCLUDE_FROM_ALL "${here}/precompiled/nothing.cpp")
    foreach(property IN LISTS copied)
      if(${property} STREQUAL "${property}-NOTFOUND")
        set_property(TARGET ${name} PROPERTY ${property})
      else()
        set_property(TARGET ${name} PROPERTY ${property} ${${property}})
      endif()
    endforeach()
    get_target_property(value ${target} COMPILE_FLAGS)
    if(value)
      set_property(TARGET ${name} PROPERTY COMPILE_FLAGS "${value}")
    endif()
    # Flags of the target without its libraries, since a library may itself wait for the header.
    set_target_properties(${name} PROPERTIES
      POSITION_INDEPENDENT_CODE OFF
      UNITY_BUILD OFF
      COMPILE_OPTIONS "$<TARGET_PROPERTY:${target},COMPILE_OPTIONS>;${placed};${cached}"
      COMPILE_FEATURES "$<TARGET_PROPERTY:${target},COMPILE_FEATURES>"
      COMPILE_DEFINITIONS "$<FILTER:$<TARGET_PROPERTY:${target},COMPILE_DEFINITIONS>,EXCLUDE,^(-D)?(${macros})(=|$)>"
      INCLUDE_DIRECTORIES "$<TARGET_PROPERTY:${target},INCLUDE_DIRECTORIES>")
    target_link_libraries(${name} PRIVATE chevron::run)  # LibTorch's folders are the system's
    target_include_directories(${name} SYSTEM PRIVATE ${system})
    target_precompile_headers(${name} PRIVATE "${here}/precompiled/training.hpp" ${headers})
    if(compiles_functions)
      _chevron_compile_functions(${name})
    endif()
  endif()

  # ---- The target uses it.
  target_precompile_headers(${target} REUSE_FROM ${name})
  target_compile_options(${target} PRIVATE ${cached})
  # With a shared header, CMake passes one to C files, too, which does not exist.
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "[.](c|m|mm)$")
  set_source_files_properties(${sources} TARGET_DIRECTORY ${target} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
  if(compiles_functions)
    set(scope INTERFACE)
    if(type STREQUAL "EXECUTABLE")
      set(scope PRIVATE)
    endif()
    target_link_libraries(${target} ${scope} $<TARGET_OBJECTS:${name}-functions>)
    target_link_options(${target} ${scope} LINKER:--gc-sections)
  endif()
endfunction()

# Lets clang leave functions of a header out of files that use it, and compiles these functions from the header itself.
function(_chevron_compile_functions name)
  target_compile_options(${name} PRIVATE "SHELL:-Xclang -fmodules-codegen")
  set(made "${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${name}.dir")
  set(sources "")
  get_property(multiple GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
  if(multiple)
    foreach(config IN LISTS CMAKE_CONFIGURATION_TYPES)
      list(APPEND sources "${made}/${config}/cmake_pch.hxx.pch")
      list(APPEND of_config "$<$<CONFIG:${config}>:${made}/${config}/cmake_pch.hxx.pch>")
    endforeach()
  else()
    set(sources "${made}/cmake_pch.hxx.pch")
    set(of_config "${sources}")
  endif()
  # CMake passes -x c++, but a precompiled header is no C++ text.
  foreach(source IN LISTS sources)
    set_source_files_properties("${source}" PROPERTIES
      LANGUAGE CXX GENERATED ON COMPILE_OPTIONS "-x;none" OBJECT_DEPENDS "${source}")
  endforeach()
  add_library(${name}-functions OBJECT EXCLUDE_FROM_ALL ${of_config})
  foreach(property IN ITEMS CXX_VISIBILITY_PRESET VISIBILITY_INLINES_HIDDEN COMPILE_FLAGS)
    get_target_property(value ${name} ${property})
    if(value)
      set_property(TARGET ${name}-functions PROPERTY ${property} "${value}")
    endif()
  endforeach()
  get_target_property(options ${name} COMPILE_OPTIONS)
  set_target_properties(${name}-functions PROPERTIES
    POSITION_INDEPENDENT_CODE OFF
    UNITY_BUILD OFF
    COMPILE_DEFINITIONS ""
    COMPILE_OPTIONS "${options};-Qunused-arguments")
  add_dependencies(${name}-functions ${name})
endfunction()
