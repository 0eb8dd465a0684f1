# Target verify-headers: each public header compiles alone, which is what a user does who includes it first.
#
# CMake's own all_verify_interface_header_sets reads LibTorch's headers again for each of ours. Here headers that include the same
# part of LibTorch share a precompiled header of that part. It proves as much: nothing is precompiled that a header does not include
# itself, or through other headers of Chevron, each of which is compiled alone, too. So what a header forgets to include stays missing.

add_custom_target(verify-headers)

# The rarer and larger first: a header is given the first of these that it includes, with what all that include it have in common.
set(chevron_header_pivots
  torch/csrc/distributed/c10d/ProcessGroupGloo.hpp
  torch/csrc/autograd/engine.h
  torch/optim/optimizer.h
  torch/library.h
  torch/csrc/distributed/c10d/Work.hpp
  ATen/core/Tensor.h)

# chevron_header_closure(<out> <header>): what LibTorch headers this one of Chevron's names, itself or in those of Chevron's it includes.
function(chevron_header_closure out header)
  get_property(known GLOBAL PROPERTY "chevron_closure_${header}" SET)
  if(NOT known)
    set_property(GLOBAL PROPERTY "chevron_closure_${header}" "")
    set(path "${PROJECT_SOURCE_DIR}/include/${header}")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${path}")
    set(closure "")
    file(STRINGS "${path}" lines REGEX "^#include <[^>]*/")
    foreach(line IN LISTS lines)
      string(REGEX REPLACE "^#include <([^>]*)>.*" "\\1" included "${line}")
      if(included MATCHES "^chevron/")
        chevron_header_closure(theirs "${included}")
        list(APPEND closure ${theirs})
      elseif(included MATCHES "^(ATen|c10|torch)/")
        list(APPEND closure "${included}")
      endif()
    endforeach()
    list(REMOVE_DUPLICATES closure)
    set_property(GLOBAL PROPERTY "chevron_closure_${header}" "${closure}")
  endif()
  get_property(closure GLOBAL PROPERTY "chevron_closure_${header}")
  set(${out} ${closure} PARENT_SCOPE)
endfunction()

# chevron_verify_headers(<library> <header>...): the headers of this library, as paths.
function(chevron_verify_headers library)
  list(TRANSFORM ARGN REPLACE "^${PROJECT_SOURCE_DIR}/include/" "" OUTPUT_VARIABLE headers)
  set(groups "")
  foreach(header IN LISTS headers)
    chevron_header_closure(closure "${header}")
    set(group alone)
    foreach(pivot IN LISTS chevron_header_pivots)
      if(pivot IN_LIST closure)
        string(MAKE_C_IDENTIFIER "${pivot}" group)
        if(NOT DEFINED common_${group})
          set(common_${group} ${closure})
        endif()
        foreach(name IN LISTS common_${group})
          if(NOT name IN_LIST closure)
            list(REMOVE_ITEM common_${group} "${name}")
          endif()
        endforeach()
        break()
      endif()
    endforeach()
    list(APPEND groups ${group})
    set(file "${PROJECT_BINARY_DIR}/headers/${header}.cpp")
    file(CONFIGURE OUTPUT "${file}" CONTENT "#include <${header}>\n" @ONLY)
    list(APPEND sources_${group} "${file}")
  endforeach()
  list(REMOVE_DUPLICATES groups)
  foreach(group IN LISTS groups)
    set(target ${library}-headers-${group})
    add_library(${target} OBJECT EXCLUDE_FROM_ALL ${sources_${group}})
    target_link_libraries(${target} PRIVATE ${library})
    target_compile_options(${target} PRIVATE -O0 $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)  # the latter for ccache
    list(LENGTH sources_${group} size)
    if(NOT group STREQUAL "alone" AND size GREATER 2)
      list(TRANSFORM common_${group} REPLACE "(.+)" "<\\1>")
      target_precompile_headers(${target} PRIVATE ${common_${group}})
    endif()
    add_dependencies(verify-headers ${target})
  endforeach()
endfunction()
