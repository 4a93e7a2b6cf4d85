#!/usr/bin/env bash
# subproject_test.sh BUILD_DIR SOURCE_DIR: a project that adds the source tree by add_subdirectory
# or FetchContent gets the target fsdp::fsdp, and neither our tests nor our settings. It configures
# such projects and compiles their own file; building the library would take minutes.
set -euo pipefail

usage="usage: subproject_test.sh BUILD_DIR SOURCE_DIR"
build=$(realpath "${1:?$usage}") source=$(realpath "${2:?$usage}")
top=$(mktemp -d)
trap 'rm -rf "$top"' EXIT
unset CMAKE_PREFIX_PATH CMAKE_BUILD_TYPE
failures=0

# fact SENTENCE: holds if the status just before is 0; shows $out otherwise.
fact() {
  if (($? == 0)); then echo "ok: $1"; return; fi
  failures=$((failures + 1))
  printf 'NOT: %s\n%s\n' "$1" "$out" | head -n 60
}
value() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }
# What ccache knows from an earlier run isn't compiled again; to it, paths below $top are relative.
launcher=$(value CMAKE_CXX_COMPILER_LAUNCHER)
[[ -z $launcher ]] || export CMAKE_CXX_COMPILER_LAUNCHER=$launcher CCACHE_BASEDIR=$top
libtorch=$(realpath "$build/package/torch")
same=("-DCMAKE_CXX_COMPILER=$(value CMAKE_CXX_COMPILER)"
  "-DCMAKE_PREFIX_PATH=$(value CMAKE_PREFIX_PATH)")

# project NAME LINES...: a project in $top/NAME with the lines that bring fsdp. Its Flags.cmake has
# the name of a module of ours, and it prints the settings that must be its own.
project() {
  mkdir -p "$top/$1"
  cp "$source/examples/hello/main.cpp" "$top/$1/"
  echo 'message(FATAL_ERROR "the module of the parent project")' > "$top/$1/Flags.cmake"
  cat > "$top/$1/CMakeLists.txt" << END
cmake_minimum_required(VERSION 3.25)
project(mine LANGUAGES CXX)
set(CMAKE_MODULE_PATH \${CMAKE_CURRENT_SOURCE_DIR})
set(CMAKE_CXX_STANDARD 17)
$(printf '%s\n' "${@:2}")
message(STATUS "after: \${CMAKE_CXX_STANDARD}, [\${CMAKE_BUILD_TYPE}], \
[\${CMAKE_RUNTIME_OUTPUT_DIRECTORY}], [\${CMAKE_POSITION_INDEPENDENT_CODE}]")
add_executable(mine main.cpp)
target_link_libraries(mine PRIVATE fsdp::fsdp)
END
}
# configure NAME ARGUMENTS...: into $top/NAME/build; the words of its output on one line.
configure() {
  cmake -S "$top/$1" -B "$top/$1/build" -G Ninja "${same[@]}" "${@:2}" 2>&1 | tr -s ' \n' ' '
  return "${PIPESTATUS[0]}"
}
commands() { ninja -C "$top/$1/build" -t commands "${@:2}"; }
few=(-DFSDP_CUDA=OFF -DFSDP_MPI=OFF)  # quicker

set +e

# ---- add_subdirectory ----

project subdirectory "add_subdirectory($source fsdp)"
out=$(configure subdirectory "-DFSDP_LIBTORCH=$libtorch")
fact "a project configures with add_subdirectory"
[[ $out == *"after: 17, [], [], []"* ]]
fact "its C++ standard, build type, output folders and flags stay its own"
out=$(commands subdirectory mine | grep -e ' -o mine ')
[[ $out == *" fsdp/lib/libfsdp.so"*libtorch_cpu.so* && $out == *-rpath,*fsdp/lib*torch/lib* ]]
fact "its program is linked with libfsdp and LibTorch, and finds both when it runs"
out=$(commands subdirectory CMakeFiles/mine.dir/main.cpp.o)
[[ $out == *"-I$source/include"*"-isystem "*/torch/include* && $out == *-std=gnu++20* ]]
fact "it gets our headers, LibTorch's, and C++20"
[[ $out == *main.cpp* && $out != *-Wall* && $out != *-O3* && $out != *"$source/src"* &&
  $out != *-fvisibility* ]]
fact "it gets none of our warnings, optimisation or private headers"
out=$(commands subdirectory)
[[ $out == *"-o fsdp/bin/fsdp "* && $out != *_test.cpp* && $out != *gtest* && $out != *fsdp-bench* ]]
fact "no test and no benchmark joins its build, and the launcher does"
[[ $out == *-O3*unity_src_* && $out != *-Werror* ]]
fact "the library is optimised where nobody chose a build type, and warnings don't stop it"
out=$(find "$top/subdirectory/build" -name cmake_install.cmake -exec grep -l libfsdp {} +
  find "$top/subdirectory/build" -name 'CPack*.cmake' -o -name compile_commands.json)
[[ -z $out ]]
fact "nothing of ours is installed or packaged with it"
out=$(ctest --test-dir "$top/subdirectory/build" -N 2>&1)
[[ $out != *"Test "*"#1"* ]]
fact "it has none of our tests"
out=$(ninja -C "$top/subdirectory/build" CMakeFiles/mine.dir/main.cpp.o 2>&1)
fact "its own file compiles"
out=$(find "$top/subdirectory/build" -path '*.dir/*.o')
[[ $out == */mine.dir/main.cpp.o && $out != *$'\n'* ]]
fact "without the library having been built"

out=$(configure subdirectory -DFSDP_INSTALL=ON "${few[@]}") &&
  grep -q libfsdp "$top"/subdirectory/build/fsdp/cmake_install.cmake
fact "FSDP_INSTALL=ON installs ours as well"

# ---- FetchContent ----

project content 'include(FetchContent)' "FetchContent_Declare(fsdp SOURCE_DIR $source)" \
  'FetchContent_MakeAvailable(fsdp)'
out=$(configure content "-DFSDP_LIBTORCH=$libtorch" "${few[@]}")
fact "a project configures with FetchContent"
out=$(commands content)
[[ $out == *_deps/fsdp-build/lib/libfsdp.so* && $out == *"-o _deps/fsdp-build/bin/fsdp "* &&
  $out != *_test.cpp* ]]
fact "it links libfsdp, has the launcher and no test"
project override 'include(FetchContent)' 'FetchContent_Declare(fsdp GIT_REPOSITORY /nonexistent)' \
  'FetchContent_MakeAvailable(fsdp)'
out=$(configure override "-DFSDP_LIBTORCH=$libtorch" "${few[@]}" \
  "-DFETCHCONTENT_SOURCE_DIR_FSDP=$source")
fact "FETCHCONTENT_SOURCE_DIR_FSDP takes the place of a download"

# ---- which LibTorch ----

version=$(sed -n 's/^torch=//p' "$source/fsdp")
here=$(realpath "$libtorch")
mkdir "$top/bin"
python3_says() {  # COMMAND: of a shell
  printf '#!/bin/sh\n%s\n' "$1" > "$top/bin/python3"
  chmod +x "$top/bin/python3"
}
configure_with() {  # NAME: and no LibTorch but what was put into $top
  rm -rf "$top/$1/build"
  HOME=$top XDG_CACHE_HOME=$top/cache PATH=$top/bin:$PATH configure "$1" "${few[@]}"
}
project plain "add_subdirectory($source fsdp)"
python3_says "exit 1"
out=$(configure_with plain)
[[ $? != 0 && $out == *"FSDP_LIBTORCH is not set, and there is no LibTorch $version in python3"* &&
  $out == *"HINT: $source/fsdp deps fetches it"*-DFSDP_LIBTORCH=* ]]
fact "no LibTorch is one sentence and what to do"
mkdir -p "$top/cache/fsdp.cpp/libtorch-$version-cpu"
ln -s "$here" "$top/cache/fsdp.cpp/libtorch-$version-cpu/torch"
out=$(configure_with plain)
[[ $out == *"LibTorch $version in $top/cache/"* ]]
fact "the LibTorch in the cache of ./fsdp is found"
mkdir "$top/site"
ln -s "$here" "$top/site/torch"
python3_says "echo $top/site/torch"
out=$(configure_with plain)
[[ $out == *"LibTorch $version in $top/site/torch"* ]]
fact "that of python3 is found, and comes first"
mkdir -p "$top"/old/{lib,include/torch/headeronly}
touch "$top/old/lib/libtorch_cpu.so"
printf '#define TORCH_VERSION_%s\n' "MAJOR 1" "MINOR 2" "PATCH 3" \
  > "$top/old/include/torch/headeronly/version.h"
python3_says "echo $top/old"
out=$(configure_with plain)
[[ $out == *"LibTorch $version in $top/cache/"* ]]
fact "a python3 with another version is passed over"
rm -rf "$top/cache"
out=$(configure_with plain)
[[ $? != 0 && $out == *"cache of ./fsdp (python3 has 1.2.3)"*HINT:* ]]
fact "and named where there is nothing else"

project torch "set(TORCH_INSTALL_PREFIX $here)" "add_subdirectory($source fsdp)"
out=$(configure_with torch)
[[ $out == *"LibTorch $version in $here"* ]]
fact "the LibTorch of the parent's find_package(Torch) comes before all"
project torch "set(TORCH_INSTALL_PREFIX $top/old)" "add_subdirectory($source fsdp)"
out=$(configure_with torch)
[[ $? != 0 && $out == *"find_package(Torch) found LibTorch 1.2.3 in $top/old;"*HINT:* ]]
fact "one of another version is refused"

((failures == 0)) || { echo "$failures facts do not hold"; exit 1; }
