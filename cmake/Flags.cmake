# fsdp_flags(TARGET): warnings as errors and the chosen sanitizers, on our own targets only.
function(fsdp_flags target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Werror
    -Wno-unused-parameter
    -Wno-missing-field-initializers  # option structs are filled by designated initialisers
    -Wno-restrict)                   # false alarm of g++ 12 on std::string + (GCC bug 105651)
  get_target_property(type ${target} TYPE)
  if(type MATCHES "EXECUTABLE|OBJECT_LIBRARY")
    # False alarms: g++ 12 where option structs that hold a std::function are filled in place; g++ 13
    # in LibTorch's Function::apply, and on references into what a temporary only points to.
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
