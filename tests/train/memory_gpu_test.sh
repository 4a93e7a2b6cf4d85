#!/usr/bin/env bash
# memory_gpu_test.sh BINARY: on a GPU, `fsdp train` reports planned and measured memory after step 3,
# and they agree. A batch that fits on no GPU ends with an error that says what holds the memory and
# what would help.
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

if train 16384; then echo "it fit"; exit 1; fi
cat err
for word in held: planned: '1\. ' '2\. ' '3\. ' saves; do
  grep -q "$word" err || { echo "\"$word\" is missing"; exit 1; }
done
