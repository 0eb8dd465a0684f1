# Target verify-headers: each public header compiles with nothing before it but what it includes itself, which is what a user meets
# who includes it first.
#
# CMake's own all_verify_interface_header_sets compiles a file for each header. Here a file holds a chain of headers, each of which
# includes all those before it, itself or through others; so the file proves as much of each as a file of its own would: nothing
# stands before a header that it does not bring itself, and what it forgets to include stays missing. Chains that include the same
# part of LibTorch share a precompiled header of that part, for the same reason.

add_custom_target(verify-headers)

# The rarer and larger first: a header is given the first of these that it includes, with what all that include it have in common.
set(chevron_header_pivots
  torch/csrc/distributed/c10d/ProcessGroupGloo.hpp
  torch/csrc/autograd/engine.h
  torch/optim/optimizer.h
  torch/library.h
  torch/csrc/distributed/c10d/Work.hpp
  ATen/core/Tensor.h)

# chevron_header_closure(<out> <header>): the headers of Chevron's and of LibTorch's that this one of Chevron's includes, itself or
# through other headers of Chevron's, and its own name.
function(chevron_header_closure out header)
  get_property(known GLOBAL PROPERTY "chevron_closure_${header}" SET)
  if(NOT known)
    set_property(GLOBAL PROPERTY "chevron_closure_${header}" "")
    set(path "${PROJECT_SOURCE_DIR}/include/${header}")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${path}")
    set(closure "${header}")
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

# chevron_header_chains(<out> <folder> <header>...): files in this folder that hold these headers in chains, each header once. A header
# goes to the end of the chain whose last one includes most of what it includes; those that include least come first.
function(chevron_header_chains out folder)
  set(by_size "")
  foreach(header IN LISTS ARGN)
    chevron_header_closure(closure "${header}")
    list(LENGTH closure size)
    math(EXPR size "10000 + ${size}")  # five digits, so that their order is that of numbers
    list(APPEND by_size "${size} ${header}")
  endforeach()
  list(SORT by_size)
  set(ends "")  # the number of a chain and its last header, the longest closure first
  set(chains 0)
  foreach(entry IN LISTS by_size)
    string(REGEX REPLACE "^[0-9]+ " "" header "${entry}")
    chevron_header_closure(closure "${header}")
    set(chain "")
    foreach(end IN LISTS ends)
      string(REGEX MATCH "^([0-9]+) (.*)" _ "${end}")
      if(CMAKE_MATCH_2 IN_LIST closure)
        set(chain ${CMAKE_MATCH_1})
        list(REMOVE_ITEM ends "${end}")
        break()
      endif()
    endforeach()
    if(chain STREQUAL "")
      set(chain ${chains})
      math(EXPR chains "${chains} + 1")
      set(text_${chain} "")
    endif()
    string(APPEND text_${chain} "#include <${header}>\n")
    list(PREPEND ends "${chain} ${header}")
  endforeach()
  set(files "")
  foreach(end IN LISTS ends)
    string(REGEX MATCH "^([0-9]+) (.*)" _ "${end}")
    set(file "${folder}/${CMAKE_MATCH_2}.cpp")
    # Written only where it says something new: else it would be compiled again.
    file(CONFIGURE OUTPUT "${file}" CONTENT "${text_${CMAKE_MATCH_1}}" @ONLY)
    list(APPEND files "${file}")
  endforeach()
  set(${out} ${files} PARENT_SCOPE)
endfunction()

# chevron_verify_headers(<library> <header>...): the headers of this library, as paths.
function(chevron_verify_headers library)
  list(TRANSFORM ARGN REPLACE "^${PROJECT_SOURCE_DIR}/include/" "" OUTPUT_VARIABLE headers)
  set(groups "")
  foreach(header IN LISTS headers)
    chevron_header_closure(closure "${header}")
    list(FILTER closure EXCLUDE REGEX "^chevron/")
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
    list(APPEND headers_${group} "${header}")
  endforeach()
  list(REMOVE_DUPLICATES groups)
  foreach(group IN LISTS groups)
    chevron_header_chains(sources "${PROJECT_BINARY_DIR}/headers" ${headers_${group}})
    set(target ${library}-headers-${group})
    add_library(${target} OBJECT EXCLUDE_FROM_ALL ${sources})
    target_link_libraries(${target} PRIVATE ${library})
    target_compile_options(${target} PRIVATE -O0 ${chevron_cached_precompiled})
    list(LENGTH sources size)
    if(NOT group STREQUAL "alone" AND size GREATER 2)
      list(TRANSFORM common_${group} REPLACE "(.+)" "<\\1>")
      target_precompile_headers(${target} PRIVATE ${common_${group}})
    endif()
    add_dependencies(verify-headers ${target})
  endforeach()
endfunction()
