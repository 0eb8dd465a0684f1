# FindLibTorch: LibTorch's CPU side as the target LibTorch::cpu.
#
# LibTorch's own package file insists on a complete CUDA toolkit whenever the library was built with CUDA, even for programs
# that use none of it, so it is not used. This module imports libtorch_cpu and libc10 from a `torch` folder (a Python wheel's or
# an unpacked LibTorch archive's) and nothing else.
#
# Where it looks, first hit wins:
#   1. the cache variable or environment variable CHEVRON_TORCH_DIR: a folder that holds include/ and lib/
#   2. .venv in the source tree of the project that calls
#   3. the torch of `python3`, if it has one
#
# Sets LibTorch_FOUND, LibTorch_VERSION and LibTorch_DIR_USED.

set(CHEVRON_TORCH_DIR "" CACHE PATH "LibTorch to use: a folder that holds include/ and lib/ (empty: .venv, then python3's torch)")

set(_torch_header "include/ATen/core/Tensor.h")
set(_torch_dir "")
set(_torch_tried "")
set(_torch_given "${CHEVRON_TORCH_DIR}")
if(NOT _torch_given AND DEFINED ENV{CHEVRON_TORCH_DIR})
  set(_torch_given "$ENV{CHEVRON_TORCH_DIR}")
endif()

if(_torch_given)
  list(APPEND _torch_tried "CHEVRON_TORCH_DIR=${_torch_given}")
  if(EXISTS "${_torch_given}/${_torch_header}")
    set(_torch_dir "${_torch_given}")
  endif()
else()
  list(APPEND _torch_tried "${CMAKE_SOURCE_DIR}/.venv")
  file(GLOB _torch_wheels "${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch")
  foreach(_torch_wheel IN LISTS _torch_wheels)
    if(NOT _torch_dir AND EXISTS "${_torch_wheel}/${_torch_header}")
      set(_torch_dir "${_torch_wheel}")
    endif()
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
  set(_torch_reason "LibTorch in ${_torch_dir} does not suit")
endif()

include(FindPackageHandleStandardArgs)
if(LibTorch_FIND_VERSION)
  set(_torch_wanted ${LibTorch_FIND_VERSION})
else()
  set(LibTorch_FIND_VERSION 2.7)  # the first with the C++11 string layout in every wheel
endif()
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_CPU_LIBRARY LibTorch_C10_LIBRARY LibTorch_DIR_USED
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "${_torch_reason}")

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
