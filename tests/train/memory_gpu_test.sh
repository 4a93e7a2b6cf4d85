#!/usr/bin/env bash
# memory_gpu_test.sh BINARY: on a GPU, `fsdp train` tells after step 3 what was planned and what was
# measured, near each other; and a batch that fits on none ends with what held the memory and what
# would help.
set -euo pipefail
binary=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

train() {
  "$binary" train gpt2-124m --ranks 1 --comm.backend nccl --data.train random --steps 4 \
    --train.batch "$1" --train.micro_batch "$1" > out 2> err
}

train 8 || { cat out err; exit 1; }
cat out
grep -q planned out
if grep 'than planned' err; then exit 1; fi

if train 16384; then echo "it fitted"; exit 1; fi
cat err
for word in held: planned: '1\. ' '2\. ' '3\. ' saves; do
  grep -q "$word" err || { echo "nothing of \"$word\""; exit 1; }
done
