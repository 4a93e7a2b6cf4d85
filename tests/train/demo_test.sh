#!/usr/bin/env bash
# demo_test.sh BINARY SEED BOUND: `fsdp train` without a config learns: the loss on text that it did
# not see ends below BOUND, a checkpoint is there, some text was written, and three commands follow.
set -euo pipefail
binary=$1 seed=$2 bound=$3
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export FSDP_BACKEND=shm  # on the CPU, also where there is a GPU

"$binary" train --seed "$seed" > out 2> err || { cat out err; exit 1; }
loss=$(sed -n 's/.*"eval_loss":\([0-9.]*\).*/\1/p' runs/demo/metrics.jsonl | tail -n 1)
echo "seed $seed: loss $loss on held-out text (bound $bound)"
awk -v loss="$loss" -v bound="$bound" 'BEGIN { exit !(loss != "" && loss < bound) }'
[[ -e runs/demo/checkpoints/latest/.metadata ]]
grep -q '^the model writes:' out
[[ $(sed -n '/^Next:/,$p' out | grep -c '^  [^ ]') == 3 ]]
