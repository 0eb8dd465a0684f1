# FindLibTorchCUDA: LibTorch's CUDA side with CUDA's runtime and NCCL, as the target LibTorch::cuda. Call it after find_package(LibTorch).
#
# Neither a CUDA toolkit nor its compiler is needed: what PyTorch's wheel brings along, in the folders `nvidia/*` beside `torch`, has
# the libraries and nearly all headers. (CUDA's `crt/` and `nv/` are in packages of their own, `cuda-toolkit[crt,cccl]`.)
#
# Where it looks. Headers, first hit wins for each: CHEVRON_CUDA_DIR (a cache or environment variable: one or more folders that hold
# include/), the folders beside `torch`, CUDA_HOME, CUDA_PATH, nvcc's toolkit, /usr/local/cuda, the system's own. Libraries: those
# that LibTorch itself loads, beside `torch`; else in the same places. Folders with another CUDA than LibTorch's are passed over.
#
# Sets LibTorchCUDA_FOUND, LibTorchCUDA_VERSION (CUDA's: 13.0) and LibTorchCUDA_REASON: why there is none, and the remedy.

set(CHEVRON_CUDA_DIR "" CACHE STRING "CUDA and NCCL to use first: folders that hold include/ (empty: beside LibTorch, then a toolkit)")

set(LibTorchCUDA_REASON "")
set(LibTorchCUDA_VERSION "")
set(_cuda_torch_lib "${LibTorch_DIR_USED}/lib")
if(NOT LibTorch_DIR_USED)
  set(LibTorchCUDA_REASON "there is no LibTorch. Remedy: find_package(LibTorch) first")
else()
  find_library(LibTorchCUDA_TORCH_LIBRARY torch_cuda PATHS "${_cuda_torch_lib}" NO_DEFAULT_PATH NO_CACHE)
  find_library(LibTorchCUDA_C10_LIBRARY c10_cuda PATHS "${_cuda_torch_lib}" NO_DEFAULT_PATH NO_CACHE)
  if(NOT LibTorchCUDA_TORCH_LIBRARY OR NOT LibTorchCUDA_C10_LIBRARY)
    set(LibTorchCUDA_REASON "the LibTorch in ${LibTorch_DIR_USED} was built for CPUs only. "
      "Remedy: one built for CUDA, such as PyPI's torch wheel for Linux on x86-64")
    string(JOIN "" LibTorchCUDA_REASON ${LibTorchCUDA_REASON})
  endif()
endif()

if(NOT LibTorchCUDA_REASON)
  # Which CUDA: the name under which libc10_cuda asks for its runtime.
  file(STRINGS "${LibTorchCUDA_C10_LIBRARY}" _cuda_major REGEX "libcudart(-[0-9a-f]+)?\\.so\\.[0-9]+" LIMIT_COUNT 1)
  string(REGEX MATCH "\\.so\\.([0-9]+)" _cuda_major "${_cuda_major}")
  set(_cuda_major "${CMAKE_MATCH_1}")

  set(_cuda_given ${CHEVRON_CUDA_DIR})
  if(NOT _cuda_given AND DEFINED ENV{CHEVRON_CUDA_DIR})
    string(REPLACE ":" ";" _cuda_given "$ENV{CHEVRON_CUDA_DIR}")
  endif()
  # The wheels of CUDA 13 share nvidia/cu13, those of CUDA 12 have a folder for each library.
  file(GLOB _cuda_wheels LIST_DIRECTORIES ON "${LibTorch_DIR_USED}/../nvidia/*")
  list(TRANSFORM _cuda_wheels REPLACE "/torch/\\.\\./" "/")
  set(_cuda_toolkits "")
  if(DEFINED ENV{CUDA_HOME})
    list(APPEND _cuda_toolkits "$ENV{CUDA_HOME}")
  endif()
  if(DEFINED ENV{CUDA_PATH})
    list(APPEND _cuda_toolkits "$ENV{CUDA_PATH}")
  endif()
  find_program(_cuda_nvcc nvcc NO_CACHE)
  if(_cuda_nvcc)
    file(REAL_PATH "${_cuda_nvcc}" _cuda_nvcc)
    cmake_path(GET _cuda_nvcc PARENT_PATH _cuda_nvcc)
    cmake_path(GET _cuda_nvcc PARENT_PATH _cuda_nvcc)
    list(APPEND _cuda_toolkits "${_cuda_nvcc}")
  endif()
  list(APPEND _cuda_toolkits /usr/local/cuda "/usr/local/cuda-${_cuda_major}")

  # _cuda_version(<out> <folder that holds cuda_runtime_api.h>): CUDA's version, as 13.0; empty where there is none.
  function(_cuda_version out folder)
    set(version "")
    if(EXISTS "${folder}/cuda_runtime_api.h")
      file(STRINGS "${folder}/cuda_runtime_api.h" line REGEX "#define +CUDART_VERSION +[0-9]+" LIMIT_COUNT 1)
      string(REGEX MATCH "[0-9]+$" number "${line}")
      if(number)
        math(EXPR major "${number} / 1000")
        math(EXPR minor "${number} % 1000 / 10")
        set(version "${major}.${minor}")
      endif()
    endif()
    set(${out} "${version}" PARENT_SCOPE)
  endfunction()

  set(_cuda_roots "")
  set(_cuda_others "")
  foreach(_cuda_root IN LISTS _cuda_given _cuda_wheels _cuda_toolkits)
    _cuda_version(_cuda_found "${_cuda_root}/include")
    if(_cuda_found AND NOT _cuda_found MATCHES "^${_cuda_major}\\.")
      list(APPEND _cuda_others "CUDA ${_cuda_found} in ${_cuda_root}")
    elseif(IS_DIRECTORY "${_cuda_root}")
      list(APPEND _cuda_roots "${_cuda_root}")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES _cuda_others)

  set(_cuda_used "")
  set(_cuda_missing "")
  foreach(_cuda_header IN ITEMS cuda_runtime_api.h crt/host_defines.h nv/target cublas_v2.h cusparse.h cusolverDn.h nccl.h
                                nvtx3/nvToolsExt.h)
    unset(_cuda_folder)
    find_path(_cuda_folder ${_cuda_header} PATHS ${_cuda_roots} PATH_SUFFIXES include include/cccl NO_DEFAULT_PATH NO_CACHE)
    if(NOT _cuda_folder)
      find_path(_cuda_folder ${_cuda_header} NO_CACHE)
      _cuda_version(_cuda_found "${_cuda_folder}")
      if(_cuda_found AND NOT _cuda_found MATCHES "^${_cuda_major}\\.")
        list(APPEND _cuda_others "CUDA ${_cuda_found} in ${_cuda_folder}")
        set(_cuda_folder "")
      endif()
    endif()
    if(_cuda_folder)
      string(REGEX REPLACE "/$" "" _cuda_folder "${_cuda_folder}")
      list(APPEND _cuda_used "${_cuda_folder}")
    else()
      list(APPEND _cuda_missing "${_cuda_header}")
    endif()
    if(_cuda_header STREQUAL "cuda_runtime_api.h")
      _cuda_version(LibTorchCUDA_VERSION "${_cuda_folder}")
    endif()
  endforeach()
  # In the order of preference, so that a folder used for one header hides no better one's.
  set(LibTorchCUDA_INCLUDE_DIRS "")
  foreach(_cuda_root IN LISTS _cuda_roots)
    foreach(_cuda_folder IN ITEMS "${_cuda_root}/include" "${_cuda_root}/include/cccl")
      if(_cuda_folder IN_LIST _cuda_used)
        list(APPEND LibTorchCUDA_INCLUDE_DIRS "${_cuda_folder}")
      endif()
    endforeach()
  endforeach()
  list(APPEND LibTorchCUDA_INCLUDE_DIRS ${_cuda_used})
  list(REMOVE_DUPLICATES LibTorchCUDA_INCLUDE_DIRS)

  set(_cuda_places ${_cuda_wheels} "${LibTorch_DIR_USED}" ${_cuda_roots})
  foreach(_cuda_library IN ITEMS cudart nccl)
    set(_cuda_soname "libnccl.so.2")
    if(_cuda_library STREQUAL "cudart")
      set(_cuda_soname "libcudart.so.${_cuda_major}")
    endif()
    find_library(LibTorchCUDA_${_cuda_library} NAMES ${_cuda_soname} PATHS ${_cuda_places} PATH_SUFFIXES lib lib64
      NO_DEFAULT_PATH NO_CACHE)
    find_library(LibTorchCUDA_${_cuda_library} NAMES ${_cuda_soname} NO_CACHE)
    if(NOT LibTorchCUDA_${_cuda_library})
      list(APPEND _cuda_missing "${_cuda_soname}")
    endif()
  endforeach()

  if(_cuda_missing)
    list(JOIN _cuda_missing ", " _cuda_missing)
    list(JOIN _cuda_others ", " _cuda_others)
    if(_cuda_others)
      set(_cuda_others " (not used, since LibTorch is built for CUDA ${_cuda_major}: ${_cuda_others})")
    endif()
    set(LibTorchCUDA_REASON "there is a LibTorch for CUDA ${_cuda_major}, but not ${_cuda_missing}${_cuda_others}. "
      "Remedy: pip install 'cuda-toolkit[crt,cccl]' beside torch, or CHEVRON_CUDA_DIR=<folder that holds include/>")
    string(JOIN "" LibTorchCUDA_REASON ${LibTorchCUDA_REASON})
  endif()
endif()

if(LibTorchCUDA_REASON)
  set(LibTorchCUDA_complete "")
else()
  set(LibTorchCUDA_complete ON)
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorchCUDA REQUIRED_VARS LibTorchCUDA_complete VERSION_VAR LibTorchCUDA_VERSION
  REASON_FAILURE_MESSAGE "${LibTorchCUDA_REASON}")

if(LibTorchCUDA_FOUND AND NOT TARGET LibTorch::cuda)
  add_library(LibTorch::c10_cuda SHARED IMPORTED)
  set_target_properties(LibTorch::c10_cuda PROPERTIES IMPORTED_LOCATION "${LibTorchCUDA_C10_LIBRARY}")
  foreach(_cuda_library IN ITEMS cudart nccl)
    add_library(LibTorch::${_cuda_library} SHARED IMPORTED)
    set_target_properties(LibTorch::${_cuda_library} PROPERTIES IMPORTED_LOCATION "${LibTorchCUDA_${_cuda_library}}")
  endforeach()
  add_library(LibTorch::cuda INTERFACE IMPORTED)
  target_link_libraries(LibTorch::cuda INTERFACE LibTorch::cpu LibTorch::c10_cuda LibTorch::cudart LibTorch::nccl)
  # libtorch_cuda registers its kernels when it is loaded; nothing names a symbol of it, so some linkers would leave it out.
  target_link_options(LibTorch::cuda INTERFACE
    "LINKER:--push-state,--no-as-needed,${LibTorchCUDA_TORCH_LIBRARY},--pop-state")
  set_target_properties(LibTorch::cuda PROPERTIES
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${LibTorchCUDA_INCLUDE_DIRS}"
    INTERFACE_INCLUDE_DIRECTORIES "${LibTorchCUDA_INCLUDE_DIRS}"
    INTERFACE_COMPILE_DEFINITIONS "USE_C10D_NCCL")
endif()
