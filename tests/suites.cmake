# add_suites(PROGRAM LABEL WITHOUT PROPERTIES...): one ctest entry per suite of a GoogleTest program,
# LABEL.SUITE. WITHOUT: "", or "-" and patterns of cases to leave out. ctest calls it when it lists the
# tests.
#
# Loading LibTorch takes a program some tenths of a second, longer than most cases, so the cases of a
# suite share a process. With FSDP_TEST_CASES=1 in the environment every case is an entry of its own,
# SUITE.CASE; `./fsdp test FILTER` sets it, so that FILTER can be the name of a case.

cmake_policy(VERSION 3.25)

# ctest says "Skipped" if all cases of an entry were skipped. It prefers that to a failure, so nothing
# may follow the skipped cases in GoogleTest's summary.
set(all_skipped "\\[  PASSED  \\] 0 tests\\.[ \n]+(\\[  SKIPPED \\][^\n]*[ \n]*)+$")

# The names of PROGRAM's cases, in its order. A file beside the calling one keeps them until the program
# or the caller changes.
function(list_cases result program without)
  set(file "${CMAKE_CURRENT_LIST_FILE}.txt")
  if(NOT EXISTS "${file}" OR NOT "${file}" IS_NEWER_THAN "${program}" OR
     NOT "${file}" IS_NEWER_THAN "${CMAKE_CURRENT_LIST_FILE}")
    execute_process(COMMAND "${program}" --gtest_list_tests "--gtest_filter=*${without}"
      OUTPUT_VARIABLE lines RESULT_VARIABLE status TIMEOUT 60)
    if(NOT status EQUAL 0)
      message(FATAL_ERROR "${program} doesn't list its tests: ${status}\n${lines}")
    endif()
    string(REGEX REPLACE " +#[^\n]*" "" lines "${lines}")
    string(REGEX MATCHALL "[^\n]+" lines "${lines}")
    set(cases)
    foreach(line IN LISTS lines)
      if(line MATCHES "^  (.+)")
        string(APPEND cases "${suite}${CMAKE_MATCH_1}\n")
      elseif(line MATCHES "\\.$")
        set(suite "${line}")
      endif()
    endforeach()
    file(WRITE "${file}" "${cases}")
  endif()
  file(STRINGS "${file}" cases)
  set(${result} "${cases}" PARENT_SCOPE)
endfunction()

function(add_suites program label without)
  if(NOT EXISTS "${program}")
    add_test("${program}_NOT_BUILT" "${program}_NOT_BUILT")
    return()
  endif()
  list_cases(cases "${program}" "${without}")
  set(seen)
  foreach(case IN LISTS cases)
    string(REGEX REPLACE "\\..*" "" suite "${case}")
    if(NOT "$ENV{FSDP_TEST_CASES}" STREQUAL "")
      set(name "${case}")
      set(those "${case}")
    elseif(suite IN_LIST seen)
      continue()
    else()
      list(APPEND seen "${suite}")
      set(name "${label}.${suite}")
      set(those "${suite}.*${without}")
    endif()
    add_test("${name}" "${program}" "--gtest_filter=${those}")
    set_tests_properties("${name}" PROPERTIES SKIP_REGULAR_EXPRESSION "${all_skipped}" ${ARGN})
  endforeach()
endfunction()
