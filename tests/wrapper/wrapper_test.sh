#!/usr/bin/env bash
# wrapper_test.sh SOURCE_DIR: facts about ./fsdp, on a simulated machine without a network.
#
# The wrapper is copied into a small tree, and PATH has only a few plain tools and the stand-ins
# below for apt-get, python3, cmake, ninja and ctest. Each stand-in records its call in $calls;
# files in $world control it (described at each).
set -euo pipefail

source=$(realpath "${1:?usage: wrapper_test.sh SOURCE_DIR}")
top=$(mktemp -d)
trap 'rm -rf "$top"' EXIT
export world=$top/world calls=$top/calls bin=$top/bin
unset CXX FSDP_LIBTORCH FSDP_DEPS FSDP_BUILD_DIR FSDP_CMAKE_ARGS FSDP_TEST_PYTHON
export XDG_CACHE_HOME=$top/cache-home SSL_CERT_FILE=/dev/null TMPDIR=$top
cache=$XDG_CACHE_HOME/fsdp.cpp
tree=$top/tree headers=$top/headers
export CMAKE_PREFIX_PATH=$headers
failures=0

# ---- the simulated machine ----

stand_in() { cat > "$bin/$1" && chmod +x "$bin/$1"; }

new_machine() {
  rm -rf "$world" "$calls" "$bin" "$tree" "$XDG_CACHE_HOME" "$headers"
  mkdir -p "$world" "$bin" "$tree"/{src,include,cmake,configs} "$headers"/include/{CLI,nlohmann,gtest,toml++}
  touch "$calls" "$tree/CMakeLists.txt" "$tree/src/main.cpp"
  touch "$headers"/include/{CLI/CLI.hpp,nlohmann/json.hpp,gtest/gtest.h,toml++/toml.h,xxhash.h}
  touch "$headers"/include/{libdeflate.h,liburing.h}
  cp "$source/fsdp" "$tree/"
  cp -r "$source/.ci" "$tree/"
  local tool
  for tool in bash cat chmod cksum cp cut df dirname du env find flock grep head ln mkdir mv nproc \
    readlink rm sed sort tail touch; do ln -s "$(command -v "$tool")" "$bin/$tool"; done
  for tool in g++ ccache mpicc mpirun ip git chromium doxygen file dpkg-shlibdeps; do
    stand_in "$tool" <<< '#!/bin/bash'
  done
  tools_that_work
}

tools_that_work() {
  stand_in id <<< '#!/bin/bash
echo 0'
  stand_in cmake << 'END'
#!/bin/bash
[[ $1 != --version ]] || { echo "cmake version 3.25.1"; exit; }
echo "cmake $*" >> "$calls"
while [[ $1 != -B ]]; do shift; done
touch "$2/build.ninja"
END
  # $world/broken: a compile error; ninja-waits: a pipe to write to on the first start, then
  # ninja-goes: a pipe to read from. Like the real ones, ninja and pip read stdin; the wrapper must
  # not give them the binary's.
  stand_in ninja << 'END'
#!/bin/bash
if [[ " $* " == *" -t commands "* ]]; then  # what it would run
  echo "c++ -o src/Unity/unity_src_shard_0_cxx.cxx.o -c src/Unity/unity_src_shard_0_cxx.cxx "
  echo "c++ -o src/one.cpp.o -c src/one.cpp"
  echo "c++ src/one.cpp.o -o bin/fsdp"
  exit
fi
echo "ninja $*" >> "$calls"
cat > /dev/null
if [[ -p $world/ninja-waits ]] && mkdir "$world/waited"; then
  echo started > "$world/ninja-waits"
  read -r < "$world/ninja-goes"
fi
echo "[1/1] compiling"
if [[ -e $world/broken ]]; then echo "FAILED: main.o"; echo "main.cpp:1: no such luck"; exit 1; fi
mkdir -p "$2/bin"
cat > "$2/bin/fsdp" << 'BINARY'
#!/bin/bash
echo "binary in $PWD: $*"
case ${1-} in cat) cat ;; fail) exit 7 ;; esac
BINARY
chmod +x "$2/bin/fsdp"
END
  # $world/offline: pip fails half-way; pip-waits: a pipe to write to, then it hangs;
  # $world/has-torch: names the folder where this python3 has torch.
  stand_in python3 << 'END'
#!/bin/bash
echo "python3 $*" >> "$calls"
case "$1 ${2-}" in
  "-V "*) echo "Python 3.11.2" ;;
  "- "*) cat "$world/has-torch" 2> /dev/null ;;
  "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo "#!$3/bin/python" > "$3/bin/tool" ;;
  "-m pip")
    cat > /dev/null
    dir=$TMPDIR
    while (($#)); do [[ $1 != --target ]] || dir=$2; shift; done
    mkdir -p "$dir/torch/include/torch" "$dir/torch/lib"
    if [[ -e $world/offline ]]; then echo "ERROR: no matching distribution"; exit 1; fi
    if [[ -p $world/pip-waits ]]; then
      echo started > "$world/pip-waits"
      read -r < "$world/never"
    fi
    touch "$dir/torch/lib/libtorch_cpu.so" ;;
esac
END
  stand_in ctest << 'END'
#!/bin/bash
echo "ctest $* with $FSDP_TEST_PYTHON" >> "$calls"
case "$*" in *-N*nothing*) echo "Total Tests: 0" ;; *-N*) echo "Total Tests: 2" ;; esac
[[ ! -e $world/tests-fail ]] || exit 8
END
  # $world/no-mirror: nothing can be installed; no-mpi: MPI packages can't be.
  stand_in apt-get << 'END'
#!/bin/bash
echo "apt-get $*" >> "$calls"
if [[ -e $world/no-mirror || -e $world/no-mpi && "$*" == *openmpi* ]]; then
  echo "E: Unable to locate package"; exit 100
fi
for name; do case $name in
  g++ | git | ccache | doxygen) printf '#!/bin/bash\n' > "$bin/$name"; chmod +x "$bin/$name" ;;
esac; done
END
}

# call ARGUMENTS...: runs ./fsdp; its stdout, stderr and exit status are in $out, $err, $rc.
call() {
  : > "$calls"
  rc=0
  PATH=$bin "${fsdp:-$tree/fsdp}" "$@" > "$top/out" 2> "$top/err" < "${input:-/dev/null}" || rc=$?
  out=$(cat "$top/out") err=$(cat "$top/err")
}
# refused SENTENCE [HINT]: it failed with this text, and printed nothing to stdout.
refused() { [[ $rc == 1 && -z $out && $err == *"fsdp: error: $1"*$'\n  HINT: '*"${2-}"* ]]; }
called() { grep -q -e "$1" "$calls"; }
cache_is_empty() { [[ -z $(find "$cache" -mindepth 1 2> /dev/null) ]]; }

# fact SENTENCE: holds if the previous status is 0; `[[ ... ]] && called x; fact "..."`.
fact() {
  if (($? == 0)); then echo "ok: $1"; return; fi
  failures=$((failures + 1))
  printf 'NOT: %s\n  rc %s, stdout: %s\n  stderr: %s\n  calls: %s\n' "$1" "$rc" "$out" "$err" \
    "$(cat "$calls")"
}

set +e

# ---- a first and a second call ----

new_machine
input=$tree/CMakeLists.txt
echo "from stdin" > "$input"
cd "$top"
call cat "two words"
[[ $rc == 0 && $out == "binary in $top: cat two words"$'\n'"from stdin" ]]
fact "stdout is the binary's alone, stdin reaches it, and it runs where the caller is"
[[ $err == *"fetching LibTorch 2.11.0"*configuring*building*"ready: LibTorch "*" s, configure "* ]]
fact "a first call says what it does and the time each part took"
[[ $err == *"building fsdp_programs: 2 files with "*" compilers, about "*" s"* ]]
fact "it says up front how many files it compiles and how long that may take"
[[ $err == *"installed ("*"LibTorch: $cache/libtorch-2.11.0-"*" MB"*"build: $tree/build/release"* ]]
fact "it lists at the end what was installed where"
called "pip .*--no-deps torch==2.11.0" || called "pip .*install .* torch==2.11.0"
fact "LibTorch comes from pip"
called "cmake .*-DFSDP_LIBTORCH=$cache/libtorch-2.11.0-[a-z]*/torch .*LAUNCHER=ccache"
fact "cmake gets the LibTorch in the cache, and ccache"
[[ $(find "$cache" -mindepth 1 -maxdepth 1 -printf '%f ') != *partial* ]]
fact "no temporary folder is left in the cache"

input=
call one
[[ $rc == 0 && $out == *": one" && -z $err && ! -s $calls ]]
fact "a second call prints nothing of its own and starts no cmake, ninja or python"
SECONDS=0
for _ in {1..10}; do call one; done
((SECONDS < 3))
fact "with nothing changed a call adds less than 0.3 s"
call fail
[[ $rc == 7 ]]
fact "the binary's exit status is the caller's"
mkdir "$top/elsewhere"
ln -s "$tree/fsdp" "$top/elsewhere/link"
cd "$top/elsewhere"
fsdp=./link call one
[[ $rc == 0 && $out == "binary in $top/elsewhere: one" && ! -s $calls ]]
fact "a call through a symlink from another folder is the same call"
call help
[[ $rc == 0 && $out == "binary in "*": help"*"test [FILTER]"*clean* ]]
fact "help is the binary's, and names the wrapper's own commands"

# ---- the benchmarks ----

call bench comm
[[ $rc == 0 && $out == *": bench comm" ]] && called "ninja .* fsdp_bench$"
fact "the benchmarks are built when they are first asked for"
call bench comm
[[ $rc == 0 && ! -s $calls ]]
fact "and not again"

# ---- what makes it build again ----

touch "$tree/src/new.cpp"
call one
[[ $rc == 0 ]] && called ninja && ! called cmake
fact "a new source is built without configuring again"
echo edited > "$tree/src/new.cpp"
touch -d 2001-01-01 "$tree/src/new.cpp"
call one
called ninja
fact "an edited source is built even if its date is old"
rm "$tree/src/new.cpp"
call one
called ninja
fact "a source that went away is noticed"
FSDP_CMAKE_ARGS="-DA=1 -DB=2" call one
called "cmake .* -DA=1 -DB=2$"
fact "other FSDP_CMAKE_ARGS configure again"
call one
rm -rf "$cache"
call one
[[ $rc == 0 && $err == *"fetching LibTorch"* ]]
fact "a LibTorch that vanished from the cache is fetched again"
touch "$world/broken" "$tree/src/main.cpp"
call one
refused "the build failed." && [[ $err == *"main.cpp:1: no such luck"* ]]
fact "a compile error is shown, and the old binary is not run"
rm "$world/broken"
call one
[[ $rc == 0 ]] && called ninja && ! called cmake
fact "after a compile error the next call goes on with the build"

# ---- two at once ----

mkfifo "$world/ninja-waits" "$world/ninja-goes"
touch "$tree/src/main.cpp"
: > "$calls"
PATH=$bin "$tree/fsdp" first > "$top/first" 2>&1 < /dev/null &
first=$!
read -rt 10 <> "$world/ninja-waits"
PATH=$bin "$tree/fsdp" second > "$top/second" 2>&1 < /dev/null &
second=$!
until grep -q "waiting for another" "$top/second" || ! kill -0 "$second"; do :; done 2> /dev/null
rm "$world/ninja-waits"
echo go > "$world/ninja-goes"
wait "$first" && wait "$second" && grep -q ": second" "$top/second" &&
  (($(grep -c ninja "$calls") == 1))
fact "two at once: the second says that it waits, and does not build again"

# ---- which LibTorch ----

new_machine
mkdir -p "$top/mine/lib" "$top/mine/include/torch"
touch "$top/mine/lib/libtorch_cpu.so"
cd "$top"
FSDP_LIBTORCH=mine call one
[[ $rc == 0 && ! -e $cache ]] && called "cmake .*-DFSDP_LIBTORCH=$top/mine " &&
  ! called "pip .*install"
fact "FSDP_LIBTORCH is used as it is"
FSDP_LIBTORCH=$top/world call one
refused "FSDP_LIBTORCH=$top/world is no LibTorch." "lib/libtorch_cpu.so"
fact "an FSDP_LIBTORCH that is none is refused with a hint"
new_machine
echo "$top/mine" > "$world/has-torch"
call one
[[ $rc == 0 ]] && called "cmake .*-DFSDP_LIBTORCH=$top/mine " && ! called "pip .*install"
fact "a python3 that has torch is used as it is"

new_machine
FSDP_FLAVOUR=cuda call deps
[[ $rc == 0 && $out == "$cache/libtorch-2.11.0-cuda/torch" ]] &&
  called "pip .*install .* torch==2.11.0" && ! called "cmake\|ninja\|--no-deps"
fact "deps fetches the LibTorch that FSDP_FLAVOUR names, prints its path and builds nothing"
FSDP_FLAVOUR=cuda call deps
[[ $rc == 0 && $out == "$cache/libtorch-2.11.0-cuda/torch" ]] && ! called "pip .*install"
fact "and fetches it once"
FSDP_FLAVOUR=gpu call one
refused "FSDP_FLAVOUR=gpu isn't a kind of LibTorch." "cpu or cuda"
fact "another FSDP_FLAVOUR is refused"

# ---- downloads that fail ----

new_machine
touch "$world/offline"
call one
[[ $rc == 1 ]] && cache_is_empty
fact "a failed download leaves the cache empty"
refused "could not download LibTorch; nothing was kept." "check the network" &&
  [[ $err == *"ERROR: no matching"* ]]
fact "a failed download is one sentence and what to do"
rm "$world/offline"
call one
[[ $rc == 0 && $out == *": one" ]]
fact "the call after a failed download succeeds"

new_machine
mkfifo "$world/pip-waits" "$world/never"
setsid env "PATH=$bin" "$tree/fsdp" one > "$top/out" 2> "$top/err" < /dev/null &
first=$!
read -rt 10 <> "$world/pip-waits"
[[ -d $(echo "$cache"/libtorch-*.partial) ]] && kill -TERM -- "-$first" && ! wait "$first" &&
  cache_is_empty
fact "an interrupted download leaves the cache empty"

new_machine
rm "$bin/df"
stand_in df <<< '#!/bin/bash
printf "Avail\n900000\n"'
call one
refused "LibTorch needs " XDG_CACHE_HOME && [[ $err == *"$cache has 0 GB free."* ]] &&
  ! called "pip .*install" && cache_is_empty
fact "a disk that is too small is said before anything is fetched"

# ---- system packages ----

new_machine
rm "$bin/g++"
call one
[[ $rc == 0 ]] && called "apt-get .*update" && called "install --no-install-recommends g++$"
fact "as root, what is missing is installed, and nothing else"
new_machine
rm "$bin"/{g++,mpicc}
touch "$world/no-mpi"
call one
[[ $rc == 0 && $err == *"going on without libopenmpi-dev"* ]]
fact "MPI packages that cannot be had do not stop the build"
new_machine
rm "$bin"/{g++,apt-get}
call one
refused "missing here: g++ (there is no C++ compiler; this machine has no apt-get)." "install them"
fact "a missing compiler is one sentence and what to do"
new_machine
rm "$bin"/{g++,ninja}
stand_in id <<< '#!/bin/bash
echo 1000'
call one
refused "missing here: g++ ninja-build (" "apt-get install g++ ninja-build" &&
  [[ $err == *"installing needs root"* ]] && ! called apt-get
fact "without root it names the packages to ask for"
new_machine
rm "$bin/g++"
touch "$world/no-mirror"
call one
refused "missing here: g++ (" "check the network and apt's sources" &&
  [[ $err == *"E: Unable to locate package"*"apt-get could not install that"* ]]
fact "a mirror that does not answer is said, with the end of apt-get's log"
new_machine
CXX=no-such-compiler call one
refused "CXX=no-such-compiler is not a program here." "unset it" && ! called apt-get
fact "a CXX that is not there is refused"

# ---- test and clean ----

new_machine
cd "$top"
fsdp=$tree/.ci/run call
[[ $rc == 0 ]] && called "ninja .* all$" && called "ctest .*/build/release --output-on-failure"
fact ".ci/run builds everything and runs every test"
python=$(echo "$cache"/python-*/bin/python)
[[ -x $python ]] && called "ctest .* with $python$" && called "pip .*install.* torch==2.11.0 numpy"
fact "the tests get a Python in the cache that has the packages they compare with"
grep -q -x "#!$python" "${python%/*}/tool"
fact "scripts of that Python name it by where it is"
call test
[[ $rc == 0 ]] && ! called "pip .*install"
fact "that Python is made once"
FSDP_TEST_PYTHON=/my/python call test
[[ $rc == 0 ]] && called "ctest .* with /my/python$"
fact "a Python that the user names is used as it is"
call test comm
called "ctest .*-R comm"
fact "a filter reaches ctest"
call test --gpu
[[ $rc == 0 ]] && called "ctest .*-L ^gpu" && [[ -e /dev/nvidia0 || $err == *"there is no GPU here"* ]]
fact "the tests that need a GPU are chosen by their label, and a machine without one says so"
call test --gpu kernels
[[ $rc == 0 ]] && called "ctest .*-L ^gpu. -R kernels"
fact "a filter chooses among those"
call test nothing
refused 'no test matches "nothing".' "lists them"
fact "a filter that matches no test is an error"
touch "$world/tests-fail"
call test
[[ $rc == 8 ]]
fact "ctest's exit status is the caller's"
rm -rf "$cache"/python-*
touch "$world/offline"
call test
refused "could not download Python" && ! called ctest && [[ ! -e $(echo "$cache"/python-*) ]]
fact "tests without their Python fail: they are never skipped"
new_machine
call one
touch "$tree/src/main.cpp" "$world/broken"
mkfifo "$world"/{pip-waits,never,ninja-waits,ninja-goes}
(call test; exit "$rc") &
running=$!
read -rt 10 <> "$world/pip-waits"
read -rt 10 <> "$world/ninja-waits"
echo go > "$world/ninja-goes"
rc=0
wait $running || rc=$?
[[ $rc == 1 && $(cat "$top/err") == *"the build failed"* ]] && flock -w 10 "$cache/.lock" true
fact "a download beside the build ends with a build that fails"

# ---- docs ----

new_machine
rm "$bin/doxygen"
call one
! called apt-get && rm -rf "$tree/build"
fact "a build does not ask for doxygen"
call test
[[ $rc == 0 ]] && called "install --no-install-recommends doxygen$"
fact "a first test installs doxygen, which checks the API reference"

new_machine
mkdir -p "$tree/docs" "$tree/include/fsdp"
echo "PROJECT_NAME = made up" > "$tree/docs/Doxyfile"
echo '#define FSDP_VERSION "1.2.3"' > "$tree/include/fsdp/version.h"
stand_in doxygen << 'END'
#!/bin/bash
echo "doxygen $* in $PWD" >> "$calls"
cat >> "$calls"
[[ ! -e $world/undocumented ]] || { echo "one.h:7: error: is not documented."; exit 1; }
END
cd "$top"
call docs
[[ $rc == 0 && $out == "$tree/build/docs/api/index.html" && ! -e $cache ]] &&
  called "doxygen - in $tree$" && called "^PROJECT_NAME = made up" &&
  called "^PROJECT_NUMBER = \"1.2.3\"" && called "^OUTPUT_DIRECTORY = \"$tree/build/docs\""
fact "docs runs doxygen with the settings, the version and the folder, and prints where it begins"
! called "cmake\|ninja\|python3\|apt-get"
fact "docs needs no LibTorch and no build"
FSDP_BUILD_DIR=$top/other call docs
[[ $rc == 0 && $out == "$top/other/docs/api/index.html" ]]
fact "docs follows FSDP_BUILD_DIR"
touch "$world/undocumented"
call docs
refused "the API reference has errors." "docs.log" && [[ $err == *"one.h:7: error: is not"* ]]
fact "a name that is not documented is shown, and docs fails"
rm "$bin"/{doxygen,mpicc}
call docs
called "install --no-install-recommends doxygen$"
fact "docs installs doxygen and nothing else"

# ---- a mistake on the line ----

for words in "docs here" "deps here" "clean all" "test --fast" "test one two"; do
  call $words
  [[ $rc == 2 && -z $out && $err == *"fsdp: error: "*"HINT: "* ]]
  fact "./fsdp $words is refused with 2, as by the binary"
done

# ---- clean ----

new_machine
call one
mkdir "$top/precious"
FSDP_BUILD_DIR=$top/precious call clean
[[ $rc == 0 && -d $top/precious && ! -e $tree/build && ! -e $cache && $err == *"removed"*" MB"* ]]
fact "clean removes build and cache, but no FSDP_BUILD_DIR that it did not fill"

((failures == 0)) || { echo "$failures facts do not hold"; exit 1; }
