#!/usr/bin/env bash
# reproduce.sh [DIR]: repeats all GPU measurements of bench/results on this machine, beside FSDP2, and
# writes the pages. Raw lines go to DIR (build/bench). Rows that are already there are skipped, so an
# interrupted run can continue.
set -euo pipefail
root=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/..
dir=${1:-$root/build/bench}
mkdir -p "$dir"
fsdp() { "$root/fsdp" "$@"; }

fsdp bench train --device cuda --rows all --peer --keep "$dir/train.jsonl" --write
fsdp bench train --device cuda --rows 3.6b-feed_forward,3.6b-offload --keep "$dir/train.jsonl"
fsdp bench train --device cuda --rows 182m --mode tape --steps 160 --keep "$dir/tape.jsonl"
fsdp bench offload --device cuda --rows all --peer --keep "$dir/offload.jsonl" --write
fsdp bench update --millions 953 --threads "$(nproc)"
"${FSDP_TEST_PYTHON:-python3}" "$root/bench/floor.py"
python3 "$root/bench/plot.py"  # the charts of docs/images
