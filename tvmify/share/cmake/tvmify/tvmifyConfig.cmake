# What a C++ program needs to run models that `tvmify.save` wrote:
#
#     find_package(tvmify 0.1 REQUIRED)
#     target_link_libraries(program PRIVATE tvmify::tvmify)
#
# The target brings PyTorch's headers and CPU libraries, TVM's small runtime and libtvmify.so, with
# the paths by which a program in its build tree finds them. There are no headers of tvmify's own: a
# saved model is a torch::jit::Module.
#
# PyTorch is not looked for by find_package(Torch), which asks for the CUDA toolkit where PyTorch
# was built for CUDA. A program that calls it itself, before this one, gets the PyTorch it found.

# Ends with a reason, which is an error if the package is REQUIRED.
macro(_tvmify_fail reason)
  set(tvmify_FOUND FALSE)
  set(tvmify_NOT_FOUND_MESSAGE "${reason}")
  return()
endmacro()

get_filename_component(_tvmify "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(_tvmify_library "${_tvmify}/lib/libtvmify.so")
if(NOT EXISTS "${_tvmify_library}" AND NOT EXISTS "${_tvmify}/builds")
  _tvmify_fail("${_tvmify_library} is missing: install tvmify again.")
endif()

# An installed tvmify lies beside the packages that it needs; for an editable one, the prefix path
# says where they are.
get_filename_component(_tvmify_places "${_tvmify}/.." ABSOLUTE)
list(APPEND _tvmify_places ${CMAKE_PREFIX_PATH})
set(_tvmify_torch "${TORCH_INSTALL_PREFIX}")
set(_tvmify_tvm "")
set(_tvmify_tvm_ffi "")
set(_tvmify_targets "")
set(_tvmify_paths "")
foreach(_tvmify_package torch tvm tvm_ffi)
  foreach(_tvmify_place IN LISTS _tvmify_places)
    if(NOT _tvmify_${_tvmify_package} AND EXISTS "${_tvmify_place}/${_tvmify_package}/lib")
      set(_tvmify_${_tvmify_package} "${_tvmify_place}/${_tvmify_package}")
    endif()
  endforeach()
  if(NOT _tvmify_${_tvmify_package})
    _tvmify_fail("the Python package ${_tvmify_package} is nowhere in ${_tvmify_places}. Configure \
with -DCMAKE_PREFIX_PATH=\"$(python -c 'import tvmify; print(tvmify.cmake_prefix_path)')\".")
  endif()
endforeach()

# PyTorch's C++ interface changes with every minor version. A wheel has a library for each of some;
# a library by itself says which one it is for.
file(STRINGS "${_tvmify_torch}/share/cmake/Torch/TorchConfigVersion.cmake" _tvmify_present
     REGEX "set\\(PACKAGE_VERSION \"" LIMIT_COUNT 1)
string(REGEX REPLACE ".*\"([0-9]+\\.[0-9]+).*" "\\1" _tvmify_present "${_tvmify_present}")
if(EXISTS "${_tvmify}/builds")
  set(_tvmify_library "${_tvmify}/builds/torch-${_tvmify_present}/lib/libtvmify.so")
  file(GLOB _tvmify_wanted RELATIVE "${_tvmify}/builds" "${_tvmify}/builds/torch-*")
  list(TRANSFORM _tvmify_wanted REPLACE "torch-" "")
else()
  file(STRINGS "${_tvmify_library}" _tvmify_wanted REGEX "torch==[0-9]" LIMIT_COUNT 1)
  string(REGEX REPLACE ".*torch==([0-9]+\\.[0-9]+).*" "\\1" _tvmify_wanted "${_tvmify_wanted}")
endif()
if(NOT _tvmify_present IN_LIST _tvmify_wanted)
  list(JOIN _tvmify_wanted ", " _tvmify_wanted)
  _tvmify_fail("this tvmify is built for PyTorch ${_tvmify_wanted}, and ${_tvmify_torch} is PyTorch \
${_tvmify_present}.")
endif()

# Its headers need C++17 or C++20, as PyTorch's own package says: by a property of its target until
# 2.14, and by a feature since.
file(STRINGS "${_tvmify_torch}/share/cmake/Torch/TorchConfig.cmake" _tvmify_standard
     REGEX "(CXX_STANDARD |cxx_std_)[0-9]+" LIMIT_COUNT 1)
string(REGEX REPLACE ".*(CXX_STANDARD |cxx_std_)([0-9]+).*" "\\2" _tvmify_standard "${_tvmify_standard}")

# For programs that are installed with the libraries that they need.
get_filename_component(_tvmify_folder "${_tvmify_library}" DIRECTORY)
set(tvmify_LIBRARY_DIRS "${_tvmify_folder}" "${_tvmify_torch}/lib" "${_tvmify_tvm}/lib"
                        "${_tvmify_tvm_ffi}/lib")

if(NOT TARGET tvmify::tvmify)
  foreach(_tvmify_path IN ITEMS "${_tvmify_library}" "${_tvmify_torch}/lib/libtorch_cpu.so"
          "${_tvmify_torch}/lib/libc10.so" "${_tvmify_tvm}/lib/libtvm_runtime.so"
          "${_tvmify_tvm_ffi}/lib/libtvm_ffi.so")
    string(REGEX REPLACE ".*/lib(.*)\\.so$" "tvmify::\\1_library" _tvmify_name "${_tvmify_path}")
    add_library(${_tvmify_name} SHARED IMPORTED)
    set_target_properties(${_tvmify_name} PROPERTIES IMPORTED_LOCATION "${_tvmify_path}")
    list(APPEND _tvmify_targets ${_tvmify_name})
    string(APPEND _tvmify_paths " \"${_tvmify_path}\"")
  endforeach()
  add_library(tvmify::tvmify INTERFACE IMPORTED)
  # A program reaches libtvmify.so through torch::jit::load and names nothing in it, and linkers
  # drop what looks unused. So they are told not to, in one piece, which CMake does not take apart;
  # what it has as targets, too, it adds to the paths of the program.
  set_target_properties(
    tvmify::tvmify
    PROPERTIES INTERFACE_COMPILE_FEATURES "cxx_std_${_tvmify_standard}"
               INTERFACE_INCLUDE_DIRECTORIES
               "${_tvmify_torch}/include;${_tvmify_torch}/include/torch/csrc/api/include"
               INTERFACE_LINK_LIBRARIES
               "-Wl,--push-state,--no-as-needed${_tvmify_paths} -Wl,--pop-state;${_tvmify_targets}")
endif()
