#!/usr/bin/env bash
# memory_gpu_test.sh BINARY: on a GPU, `fsdp train` reports planned and measured memory after step 3,
# and they agree. A batch that fits on no GPU ends with an error that says what holds the memory and
# what would help; so does a run that gets 3 % less memory than it needs, within a few steps.
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

explains() {  # the error
  cat err
  for word in held: planned: '1\. ' '2\. ' '3\. ' saves; do
    grep -q "$word" err || { echo "\"$word\" is missing"; exit 1; }
  done
}

if train 16384; then echo "it fit"; exit 1; fi
explains

train 32 || { cat out err; exit 1; }
needed=$(grep -o '"memory_mb":[0-9]*' runs/gpt2-124m*/metrics.jsonl | tail -1 | grep -o '[0-9]*$')
total=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -1)
share=$(awk "BEGIN { print 0.97 * $needed / $total }")
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,per_process_memory_fraction:$share
if train 32; then cat out; echo "it fit into 97 % of $needed MiB"; exit 1; fi
explains
