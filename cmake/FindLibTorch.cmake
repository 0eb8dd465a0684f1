# FindLibTorch: LibTorch's CPU side as the target LibTorch::cpu.
#
# LibTorch's own package file insists on a complete CUDA toolkit whenever the library was built with CUDA, even for programs
# that use none of it, so it is not used. This module imports libtorch_cpu and libc10 from a `torch` folder (a Python wheel's or
# an unpacked LibTorch archive's) and nothing else.
#
# Where it looks, first hit wins:
#   1. the cache variable CHEVRON_TORCH_DIR: a folder that holds include/ and lib/. Where it is empty, the environment variable of that
#      name is written there, so that configuring again from another shell finds the same
#   2. .venv in the source tree of the whole build, then in that of the project that calls
#   3. the torch of `python3`, if it has one
#
# Sets LibTorch_FOUND, LibTorch_VERSION, LibTorch_DIR_USED, and LibTorch_REASON: why there is none, and the remedy.

set(_torch_help "LibTorch to use: a folder that holds include/ and lib/ (empty: .venv, then python3's torch)")
set(CHEVRON_TORCH_DIR "" CACHE PATH "${_torch_help}")
if(NOT "$ENV{CHEVRON_TORCH_DIR}" STREQUAL "")
  if(CHEVRON_TORCH_DIR STREQUAL "")
    set(CHEVRON_TORCH_DIR "$ENV{CHEVRON_TORCH_DIR}" CACHE PATH "${_torch_help}" FORCE)
  elseif(NOT CHEVRON_TORCH_DIR STREQUAL "$ENV{CHEVRON_TORCH_DIR}")
    message(STATUS "chevron: the LibTorch of this build is CHEVRON_TORCH_DIR=${CHEVRON_TORCH_DIR}, not the environment's "
                   "$ENV{CHEVRON_TORCH_DIR}; to change it: -DCHEVRON_TORCH_DIR=<folder>")
  endif()
endif()

set(_torch_header "include/ATen/core/Tensor.h")
set(_torch_dir "")
set(_torch_tried "")

if(NOT CHEVRON_TORCH_DIR STREQUAL "")
  list(APPEND _torch_tried "CHEVRON_TORCH_DIR=${CHEVRON_TORCH_DIR}")
  if(EXISTS "${CHEVRON_TORCH_DIR}/${_torch_header}")
    set(_torch_dir "${CHEVRON_TORCH_DIR}")
  endif()
else()
  set(_torch_projects "${CMAKE_SOURCE_DIR}" ${PROJECT_SOURCE_DIR})
  list(REMOVE_DUPLICATES _torch_projects)
  foreach(_torch_project IN LISTS _torch_projects)
    list(APPEND _torch_tried "${_torch_project}/.venv")
    file(GLOB _torch_wheels "${_torch_project}/.venv/lib/python3*/site-packages/torch")
    foreach(_torch_wheel IN LISTS _torch_wheels)
      if(NOT _torch_dir AND EXISTS "${_torch_wheel}/${_torch_header}")
        set(_torch_dir "${_torch_wheel}")
      endif()
    endforeach()
  endforeach()
  if(NOT _torch_dir)
    list(APPEND _torch_tried "the torch package of python3")
    # find_spec does not import torch, which would take seconds.
    execute_process(
      COMMAND python3 -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE _torch_wheel OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _torch_status)
    if(_torch_status EQUAL 0 AND _torch_wheel AND EXISTS "${_torch_wheel}/${_torch_header}")
      set(_torch_dir "${_torch_wheel}")
    endif()
  endif()
endif()

set(LibTorch_VERSION "")
if(_torch_dir)
  # Newer releases keep the numbers in headeronly/.
  foreach(_torch_file IN ITEMS include/torch/headeronly/version.h include/torch/csrc/api/include/torch/version.h)
    if(NOT LibTorch_VERSION AND EXISTS "${_torch_dir}/${_torch_file}")
      file(STRINGS "${_torch_dir}/${_torch_file}" _torch_lines REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+")
      string(REGEX MATCHALL "[0-9]+" _torch_numbers "${_torch_lines}")
      string(REPLACE ";" "." LibTorch_VERSION "${_torch_numbers}")
    endif()
  endforeach()
  find_library(LibTorch_CPU_LIBRARY torch_cpu PATHS "${_torch_dir}/lib" NO_DEFAULT_PATH NO_CACHE)
  find_library(LibTorch_C10_LIBRARY c10 PATHS "${_torch_dir}/lib" NO_DEFAULT_PATH NO_CACHE)
endif()
set(LibTorch_DIR_USED "${_torch_dir}")

list(JOIN _torch_tried ", " _torch_tried)
if(NOT _torch_dir)
  set(_torch_reason "No LibTorch found in: ${_torch_tried}.\n"
    "  Remedy: 'python3 -m venv .venv && .venv/bin/pip install torch==2.11.0' in ${CMAKE_SOURCE_DIR},\n"
    "  or -DCHEVRON_TORCH_DIR=<folder that holds include/ and lib/>")
  string(JOIN "" _torch_reason ${_torch_reason})
elseif(NOT LibTorch_CPU_LIBRARY OR NOT LibTorch_C10_LIBRARY)
  set(_torch_reason "${_torch_dir} has LibTorch's headers, but lib/ lacks libtorch_cpu or libc10.\n"
    "  Remedy: -DCHEVRON_TORCH_DIR=<folder that holds include/ and lib/>")
  string(JOIN "" _torch_reason ${_torch_reason})
else()
  set(_torch_reason "LibTorch in ${_torch_dir} is ${LibTorch_VERSION}, wanted is 2.9 or later.\n"
    "  Remedy: -DCHEVRON_TORCH_DIR=<folder of a newer one>")
  string(JOIN "" _torch_reason ${_torch_reason})
endif()

include(FindPackageHandleStandardArgs)
if(LibTorch_FIND_VERSION)
  set(_torch_wanted ${LibTorch_FIND_VERSION})
else()
  set(LibTorch_FIND_VERSION 2.9)  # chevron/run/core/libtorch.hpp says why
endif()
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_CPU_LIBRARY LibTorch_C10_LIBRARY LibTorch_DIR_USED
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "${_torch_reason}")
set(LibTorch_REASON "")
if(NOT LibTorch_FOUND)
  set(LibTorch_REASON "${_torch_reason}")
endif()

if(LibTorch_FOUND AND NOT TARGET LibTorch::cpu)
  find_package(Threads REQUIRED)
  add_library(LibTorch::c10 SHARED IMPORTED)
  set_target_properties(LibTorch::c10 PROPERTIES IMPORTED_LOCATION "${LibTorch_C10_LIBRARY}")
  add_library(LibTorch::cpu SHARED IMPORTED)
  # Imported targets are system includes and put lib/ on the run path of what links them.
  set_target_properties(LibTorch::cpu PROPERTIES
    IMPORTED_LOCATION "${LibTorch_CPU_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${_torch_dir}/include;${_torch_dir}/include/torch/csrc/api/include"
    # c10d's Gloo classes are in libtorch_cpu, but their headers hide them without these.
    INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D;USE_C10D_GLOO"
    INTERFACE_LINK_LIBRARIES "LibTorch::c10;Threads::Threads"
    # Those of libtorch_cpu's own needs that lie in other wheels are found at run time by its own run path.
    INTERFACE_LINK_OPTIONS "LINKER:--allow-shlib-undefined")
endif()
