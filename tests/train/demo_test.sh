#!/usr/bin/env bash
# demo_test.sh BINARY SEED BOUND: `fsdp train` without arguments starts without a warning and learns:
# the evaluation ends below BOUND and near the training loss. It leaves a checkpoint, shows the loss
# curve and some text, and suggests four commands.
set -euo pipefail
binary=$1 seed=$2 bound=$3
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export FSDP_BACKEND=shm  # on the CPU, even if there is a GPU

"$binary" train --seed "$seed" > out 2> err || { cat out err; exit 1; }
# On a busy machine ranks wait for each other, which is reported as communication.
if grep '^warning:' out | grep -v exposed-communication || grep warning err; then exit 1; fi
loss=$(sed -n 's/.*"eval_loss":\([0-9.]*\).*/\1/p' runs/demo/metrics.jsonl | tail -n 1)
trained=$(sed -n 's/.*"loss":\([0-9.]*\),"grad_norm.*/\1/p' runs/demo/metrics.jsonl | tail -n 20 |
  awk '{ sum += $1 } END { print sum / NR }')
echo "seed $seed: loss $trained in training, $loss on held-out text (bound $bound)"
awk -v loss="$loss" -v bound="$bound" 'BEGIN { exit !(loss != "" && loss < bound) }'
awk -v loss="$loss" -v trained="$trained" 'BEGIN { exit !(loss - trained < 0.2 && trained - loss < 0.2) }'
[[ -e runs/demo/checkpoints/latest/.metadata ]]
grep -q '^Loss (' out
grep -q '^The model writes:' out
[[ $(sed -n '/^Next:/,$p' out | grep -c '^  [^ ]') == 4 ]]
