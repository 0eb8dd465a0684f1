# Compiles several source files as one: most of a file's compile time on the run side goes to LibTorch's headers and to Chevron's
# code, which are the same in all files.

option(CHEVRON_BATCHES "Compile several test files as one; OFF suits working on a single file" ON)

# chevron_batches(<out> <name> <most> SOURCES <source>...): sources that hold these sources, at most <most> in each, in the order given.
#
# A batch first includes the headers of all its files, then each file in a namespace of the file's name; by then the file's own
# includes are no-ops. So files may use the same names, and __FILE__ and messages name the file itself. A file that cannot be inside
# a namespace says so in a line `// alone: <why>` and is compiled by itself.
function(chevron_batches out name most)
  cmake_parse_arguments(PARSE_ARGV 3 arg "" "" "SOURCES")
  if(NOT CHEVRON_BATCHES)
    set(${out} ${arg_SOURCES} PARENT_SCOPE)
    return()
  endif()
  chevron_sort_by_marker(result batch alone ${arg_SOURCES})
  # Of equal size: 13 files by 6 at most are 5, 4 and 4.
  set(from 0)
  list(LENGTH batch left)
  math(EXPR batches "(${left} + ${most} - 1) / ${most}")
  while(batches GREATER 0)
    math(EXPR size "(${left} + ${batches} - 1) / ${batches}")
    list(SUBLIST batch ${from} ${size} files)
    math(EXPR from "${from} + ${size}")
    math(EXPR left "${left} - ${size}")
    math(EXPR batches "${batches} - 1")
    set(includes "")
    set(bodies "")
    foreach(source IN LISTS files)
      cmake_path(GET source PARENT_PATH folder)
      cmake_path(GET source STEM LAST_ONLY stem)
      file(STRINGS "${source}" lines REGEX "^#include ")
      foreach(line IN LISTS lines)
        if(line MATCHES "^#include \"(.*)\"")
          set(beside "${folder}/${CMAKE_MATCH_1}")
          if(EXISTS "${beside}")
            set(line "#include \"${beside}\"")
          endif()
        endif()
        list(APPEND includes "${line}")
      endforeach()
      string(APPEND bodies "namespace ${stem} {\n#include \"${source}\"\n}\n")
    endforeach()
    list(REMOVE_DUPLICATES includes)
    # doctest's CHECK, not LibTorch's: the last one wins.
    set(doctest "#include <doctest/doctest.h>")
    if(doctest IN_LIST includes)
      list(REMOVE_ITEM includes "${doctest}")
      list(APPEND includes "${doctest}")
    endif()
    list(JOIN includes "\n" includes)
    list(GET files 0 first)
    cmake_path(GET first STEM LAST_ONLY stem)
    set(file "${CMAKE_CURRENT_BINARY_DIR}/batches/${name}/${stem}.cpp")
    # Written only where it says something new: else all of it would be compiled again.
    file(CONFIGURE OUTPUT "${file}" CONTENT "// ${name}: compiled as one\n${includes}\n\n${bodies}" @ONLY)
    list(APPEND result "${file}")
  endwhile()
  set(${out} ${result} PARENT_SCOPE)
endfunction()
