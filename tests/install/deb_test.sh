#!/usr/bin/env bash
# deb_test.sh BUILD_DIR SOURCE_DIR: cpack makes Debian packages that name nothing of this machine.
# fsdp is looked at; fsdp-libtorch, which is large where LibTorch has CUDA, is made only without it,
# and then the programs run from what both packages hold. Exits with 77 where the tools are missing.
set -euo pipefail

usage="usage: deb_test.sh BUILD_DIR SOURCE_DIR"
build=$(realpath "${1:?$usage}") source=$(realpath "${2:?$usage}")
for tool in cpack dpkg-deb dpkg-shlibdeps file readelf; do
  command -v "$tool" > /dev/null || { echo "skipped: there is no $tool here"; exit 77; }
done
top=$(mktemp -d)
trap 'rm -rf "$top"' EXIT
export FSDP_BACKEND=shm FSDP_TIMEOUT=60  # the same on a machine with GPUs
unset LD_LIBRARY_PATH
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
pack() {  # COMPONENT
  cpack --config "$build/CPackConfig.cmake" -D "CPACK_COMPONENTS_ALL=$1" -B "$top/made" 2>&1
}
field() { dpkg-deb -f "$deb" "$1"; }
runpaths() { readelf -d "$@" | sed -n 's/.*R\(UN\)\?PATH).*\[\(.*\)\]/\2/p'; }

version=$(sed -n 's/^project(fsdp VERSION \([0-9.]*\).*/\1/p' "$source/CMakeLists.txt")
torch=$(sed -n 's/^torch=//p' "$source/fsdp")
libtorch=$(realpath "$build/package/torch")
architecture=$(dpkg --print-architecture)
deb=$top/made/fsdp_${version}_$architecture.deb
root=$top/root

set +e
out=$(pack fsdp)
[[ $? == 0 && -f $deb ]]
fact "cpack makes fsdp_${version}_$architecture.deb"
out=$(dpkg-deb -x "$deb" "$root" 2>&1)
fact "dpkg-deb unpacks it"
out=$(dpkg-deb -f "$deb")
[[ $(field Package) == fsdp && $(field Version) == "$version" &&
  $(field Architecture) == "$architecture" ]]
fact "it says its name, version and architecture"
[[ ", $(field Depends), " == *", fsdp-libtorch-$torch, "*"libc6 (>= "*"libstdc++6 (>= "* ]]
fact "it depends on the LibTorch that it was built with, and on the C and C++ libraries"

out=$(cd "$root" && find . -type f -o -type l)
for file in usr/bin/fsdp usr/lib/libfsdp.so "usr/lib/libfsdp.so.$version" usr/include/fsdp/fsdp.h \
  usr/lib/cmake/fsdp/{fsdp-config,fsdp-config-version,fsdp-targets,LibTorch}.cmake \
  usr/share/doc/fsdp/copyright; do
  [[ -e $root/$file ]]
  fact "it has $file"
done
out=$(cd "$root/usr/include" && find . -name '*.h' | sort)
[[ $out == "$(cd "$source/include" && find . -name '*.h' | sort)" ]]
fact "it has all public headers, and no others"
out=$(cd "$root" && find . -path '*/fsdp/torch*' -o -name '*test*')
[[ -z $out ]]
fact "it has no LibTorch, no link to this machine's, and no test"

out=$(grep -rn -F -e "$source" -e "$build" -e "$libtorch" "$root"/usr/{lib/cmake,share,include})
[[ $? == 1 && -z $out ]]
fact "its CMake files and headers name no path of this machine"
out=$(find "$root/usr" -type f \( -path '*/bin/*' -o -name 'lib*.so*' \) | sort)
(($(wc -l <<< "$out") >= 2))
fact "there are programs and libraries to look at"
for file in $out; do
  out=$(runpaths "$file")
  [[ $out == '$ORIGIN'* && -z $(tr : '\n' <<< "$out" | grep -v '^\$ORIGIN\(/\|$\)') ]]
  fact "${file#"$root/"} looks for libraries only beside itself"
done

if [[ -n $(ls "$libtorch"/{../nvidia/cudnn/lib,lib}/libcudnn.so* 2> /dev/null) ]]; then
  echo "left out: fsdp-libtorch, because LibTorch has CUDA here"
else
  out=$(pack libtorch)
  fact "cpack makes fsdp-libtorch"
  deb=$top/made/fsdp-libtorch_${version}_$architecture.deb
  out=$(dpkg-deb -f "$deb")
  [[ $(field Provides) == "fsdp-libtorch-$torch" ]]
  fact "it provides what fsdp depends on"
  out=$(dpkg-deb -x "$deb" "$root" 2>&1)
  fact "dpkg-deb unpacks it, too"
  out=$(cd / && "$root/usr/bin/fsdp" doctor 2>&1)
  [[ $out == *"LibTorch"*"$torch (CPU only) in $root/usr/lib/fsdp/torch"* ]]
  fact "the unpacked program runs with the unpacked LibTorch"
  out=$(cd "$top" && "$root/usr/bin/fsdp" train --ranks 2 --steps 2 2>&1)
  [[ $? == 0 && -f $top/runs/demo/checkpoints/step-2/.metadata ]]
  fact "and trains on its headers"

  mkdir "$top/hello"
  cp "$source"/examples/hello/* "$top/hello/"
  out=$(cmake -S "$top/hello" -B "$top/hello/build" -G Ninja "-DCMAKE_PREFIX_PATH=$root/usr" \
    "-DCMAKE_CXX_COMPILER=$(value CMAKE_CXX_COMPILER)" 2>&1 && ninja -C "$top/hello/build" 2>&1)
  fact "a project builds against the unpacked package"
  out=$("$root/usr/bin/fsdp" run -n 2 "$top/hello/build/hello" 2>&1)
  [[ $out == *"hello from 2 ranks over shm: their numbers add up to 1"* ]]
  fact "and its two ranks add up their numbers"
fi

((failures == 0)) || { echo "$failures facts do not hold"; exit 1; }
