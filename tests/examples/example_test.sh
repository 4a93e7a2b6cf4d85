#!/usr/bin/env bash
# example_test.sh EXAMPLE PROGRAM FSDP SOURCE_DIR: runs an example as its first lines say, with two
# ranks in an empty folder. It must end well, its loss must fall, and it must leave what it
# promises.
# Exits with 77 where a Python with torch is needed and there is none.
set -euo pipefail

usage="usage: example_test.sh EXAMPLE PROGRAM FSDP SOURCE_DIR"
example=${1:?$usage} program=${2:?$usage} fsdp=${3:?$usage} source=${4:?$usage}
top=$(mktemp -d)
trap 'rm -rf "$top"' EXIT
cd "$top"
export FSDP_BACKEND=shm FSDP_TIMEOUT=60 OMP_NUM_THREADS=1  # the same on a machine with GPUs
python=${FSDP_TEST_PYTHON:-python3}
failures=0

# fact SENTENCE: holds if the status just before is 0; shows $out otherwise.
fact() {
  if (($? == 0)); then echo "ok: $1"; return; fi
  failures=$((failures + 1))
  printf 'NOT: %s\n%s\n' "$1" "$out" | head -n 80
}
# The loss falls from the first line that names it to the last, by a factor of more than $1.
falls() {
  awk -v factor="$1" '
    match($0, /loss [0-9.e+-]+/) {
      last = substr($0, RSTART + 5, RLENGTH - 5) + 0
      if (!seen++) first = last
    }
    END { exit !(seen > 1 && last < first / factor) }' <<< "$out"
}
run() {  # ARGUMENTS...: with two ranks, into $out
  out=$("$fsdp" run -n 2 -- "$program" "$@" 2>&1)
}

set +e
case $example in
  quickstart)
    run here
    fact "quickstart ends well"
    falls 2
    fact "its loss falls"
    out=$(ls -la here here/step-100 2>&1)
    [[ -f here/step-100/.metadata && here/latest -ef here/step-100 ]]
    fact "it leaves a checkpoint, and a link to it"
    ;;
  lora)
    run adapters.pt
    fact "lora ends well"
    falls 10
    fact "its loss falls"
    [[ $out == *"the base is unchanged, bit for bit"* ]]
    fact "the frozen base is unchanged"
    [[ $out == *"saved 9216 of 157824 parameters to adapters.pt"* && -s adapters.pt ]]
    fact "the adapters are saved, and nothing else"
    ;;
  vision)
    run
    fact "vision ends well: it names more than 90 % of the held-out images rightly"
    falls 5
    fact "its loss falls"
    ;;
  vision-bf16)
    run bf16
    fact "vision ends well in bf16"
    [[ $out == *"bf16 (master fp32)"* ]]
    fact "its parameters are in bf16"
    ;;
  torchscript)
    "$python" -c "import torch" 2> /dev/null || { echo "skipped: $python has no torch"; exit 77; }
    out=$("$python" "$source/examples/torchscript/model.py" model.pt 2>&1)
    fact "Python writes the model"
    run model.pt trained.pt
    fact "torchscript ends well"
    falls 2
    fact "its loss falls"
    [[ $out == *"Block"*"unit"* ]]
    fact "its blocks are units, by the name of their type"
    out=$("$python" - << 'END' 2>&1
import torch
torch.manual_seed(5)
x = torch.randn(256, 8)
y = x[:, :1] * x[:, 1:2]
before, after = (((torch.jit.load(f)(x) - y) ** 2).mean().item() for f in ("model.pt", "trained.pt"))
print(before, after)
assert after < before / 2
END
    )
    fact "Python reads what was trained, and it is better"
    ;;
  train)
    run
    fact "train ends well"
    falls 2
    fact "its loss falls"
    run by-rule
    fact "train by-rule ends well"
    falls 2
    fact "its loss falls"
    run large
    fact "train large ends well"
    falls 2
    fact "its loss falls, too"
    ;;
  *)
    echo "$usage" >&2
    exit 2
    ;;
esac
((failures == 0)) || { echo "$failures facts do not hold"; exit 1; }
