#!/usr/bin/env bash
# install_test.sh BUILD_DIR SOURCE_DIR: a project outside the tree can use what `cmake --install`
# installs: the examples are built against it with find_package(fsdp) and run by the installed
# launcher.
set -euo pipefail

usage="usage: install_test.sh BUILD_DIR SOURCE_DIR"
build=$(realpath "${1:?$usage}") source=$(realpath "${2:?$usage}")
top=$(mktemp -d)
trap 'rm -rf "$top"' EXIT
prefix=$top/prefix
unset CMAKE_PREFIX_PATH FSDP_LIBTORCH
export FSDP_BACKEND=shm FSDP_TIMEOUT=60  # also on a machine with GPUs
failures=0

# fact SENTENCE: holds if the previous status is 0; otherwise shows $out.
fact() {
  if (($? == 0)); then echo "ok: $1"; return; fi
  failures=$((failures + 1))
  printf 'NOT: %s\n%s\n' "$1" "$out" | head -n 60
}
configure() {  # EXAMPLE FOLDER ARGUMENTS...
  cmake -S "$top/examples/$1" -B "$top/$2" -G Ninja "-DCMAKE_PREFIX_PATH=$prefix" "${@:3}" 2>&1
}
value() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }
# What ccache knows from an earlier run isn't compiled again; to it, paths below $top are relative.
launcher=$(value CMAKE_CXX_COMPILER_LAUNCHER)
[[ -z $launcher ]] || export CMAKE_CXX_COMPILER_LAUNCHER=$launcher CCACHE_BASEDIR=$top
libtorch=$(realpath "$build/package/torch")
compiler=-DCMAKE_CXX_COMPILER=$(value CMAKE_CXX_COMPILER)

set +e
out=$(cmake --install "$build" --prefix "$prefix" 2>&1)
fact "it installs into a prefix"
fsdp=$prefix/bin/fsdp

out=$("$fsdp" --version 2>&1)
[[ $out == "fsdp "[0-9]*.[0-9]*.[0-9]* ]]
fact "the installed binary runs and prints its version"

# The examples are copied, so that they can't find anything of the tree next to them.
cp -r "$source/examples" "$top/examples"
cd "$top"
for example in hello collectives quickstart; do
  out=$(configure "$example" "$example" "$compiler" && cmake --build "$example" -j 2 2>&1)
  fact "example $example is built against the installed package"
done
out=$("$fsdp" run -n 2 hello/hello 2>&1)
[[ $out == *"hello from 2 ranks over shm: their numbers add up to 1"* ]]
fact "two ranks of hello add up their numbers"
out=$("$fsdp" run -n 4 collectives/collectives 2>&1)
[[ $out == *"mean loss 2.5, gathered sum 6144, ranks in my row 2"* ]]
fact "four ranks of collectives print the right results"
out=$("$fsdp" run -n 2 quickstart/quickstart here 2>&1)
[[ $? == 0 && -f here/step-100/.metadata && $out == *"saved to here/step-100"* ]]
fact "two ranks of quickstart train and leave a checkpoint"
out=$(hello/hello 2>&1)
[[ $out == "hello from 1 ranks over shm: their numbers add up to 0" ]]
fact "one process without a launcher is a world of one"

out=$(configure hello wrong "$compiler" -DFSDP_LIBTORCH=/nonexistent)
[[ $? != 0 && $out == *"/nonexistent isn't LibTorch"*HINT:* ]]
fact "a path without LibTorch is an error with a hint"

mkdir -p old/lib old/include/torch/headeronly
touch old/lib/libtorch_cpu.so
printf '#define TORCH_VERSION_%s\n' "MAJOR 1" "MINOR 2" "PATCH 3" \
  > old/include/torch/headeronly/version.h
out=$(configure hello old-build "$compiler" "-DFSDP_LIBTORCH=$top/old")
[[ $? != 0 && $out == *"was built with LibTorch"*1.2.3*HINT:* ]]
fact "a LibTorch of another version is refused"

out=$(find "$prefix" -name '*.cmake' -exec grep -Hn -F -e "$source" -e "$build" -e "$libtorch" {} +)
[[ -z $out ]]
fact "no installed CMake file names the source tree, the build folder or LibTorch"
link=$(echo "$prefix"/lib*/fsdp/torch)
out=$(readlink "$link")
[[ $out == "$libtorch" ]]
fact "LibTorch is a link, so that it can be moved"
rm "$link"
mkdir "$link"
out=$(cmake --install "$build" --prefix "$prefix" 2>&1)
[[ $? == 0 && ! -L $link && -d $link ]]
fact "another install leaves a copy of LibTorch in its place"
out=$(find "$prefix" -name '*.cmake' | wc -l)
((out >= 4))
fact "CMake files are installed"
out=$(cd "$prefix/include" && find . -name '*.h' | sort)
[[ $out == "$(cd "$source/include" && find . -name '*.h' | sort)" ]]
fact "all public headers are installed, and no others"

((failures == 0)) || { echo "$failures facts don't hold"; exit 1; }
