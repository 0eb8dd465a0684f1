# One CTest entry for each case of limits.txt: it must still compile within its recorded number of evaluator operations, and
# that number must be linear in its actions. Only g++ counts them.
if(NOT CHEVRON_GCC)
  return()
endif()
set(measure "${CMAKE_CURRENT_LIST_DIR}/measure.py")
set(limits "${CMAKE_CURRENT_LIST_DIR}/limits.txt")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${limits}")
file(STRINGS "${limits}" lines REGEX "^[a-z]")
foreach(line IN LISTS lines)
  string(REGEX MATCH "^[a-z0-9_]+" case "${line}")
  add_test(NAME compile_cost.${case} COMMAND python3 "${measure}" --compiler "${CHEVRON_GCC}" --gate ${case})
  chevron_test_properties(compile_cost.${case} "${measure}" 120)
endforeach()
