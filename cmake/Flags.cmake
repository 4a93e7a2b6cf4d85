# fsdp_flags(TARGET): warnings and the chosen sanitizers, for our own targets only. Warnings are errors,
# but not in a project that adds this one: its compiler may know warnings that ours doesn't.
function(fsdp_flags target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic
    $<$<BOOL:${PROJECT_IS_TOP_LEVEL}>:-Werror>
    -Wno-unused-parameter
    -Wno-missing-field-initializers  # option structs use designated initialisers
    -Wno-restrict                    # false alarm of g++ 12 on std::string + (GCC bug 105651)
    # __FILE__ without the folder of the clone: a compiler cache fits all of them
    -fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=)
  get_target_property(type ${target} TYPE)
  if(type MATCHES "EXECUTABLE|OBJECT_LIBRARY")
    # False alarms: g++ 12 on option structs with a std::function that are initialised in place; g++ 13
    # in LibTorch's Function::apply, and on references to data that a temporary only points to.
    target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized -Wno-array-bounds -Wno-stringop-overflow
      -Wno-dangling-reference)
  else()
    # g++ 12, as -Wno-restrict
    target_compile_options(${target} PRIVATE -Wno-array-bounds -Wno-stringop-overflow)
  endif()
  if(FSDP_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${FSDP_SANITIZE} -fno-omit-frame-pointer)
    target_link_options(${target} PRIVATE -fsanitize=${FSDP_SANITIZE})
  endif()
endfunction()

# fsdp_optimise(TARGET LEVEL): instead of -O3, for code without loops over many numbers.
function(fsdp_optimise target level)
  target_compile_options(${target} PRIVATE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:${level}>)
endfunction()

# fsdp_unity(TARGET SOURCES...): compiles the sources of a folder (a room) together, sixteen at a time,
# so that LibTorch's headers are read once for all of them. FSDP_UNITY=OFF compiles each file alone.
function(fsdp_unity target)
  if(NOT FSDP_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # Types with members of an anonymous namespace are fine in a .cpp, which here is an included file.
  target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  foreach(source IN LISTS ARGN)
    get_filename_component(room ${source} ABSOLUTE)
    get_filename_component(room ${room} DIRECTORY)
    file(RELATIVE_PATH room ${PROJECT_SOURCE_DIR} ${room})
    string(MAKE_C_IDENTIFIER ${room} room)
    if(NOT DEFINED count_${room})
      set(count_${room} 0)
    endif()
    math(EXPR batch "${count_${room}} / ${FSDP_UNITY_BATCH}")
    math(EXPR count_${room} "${count_${room}} + 1")
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${room}_${batch})
  endforeach()
endfunction()
