#!/bin/sh
# reshard.sh FSDP PROGRAM RANKS: saves in a world of RANKS ranks and loads in worlds of 1 to 4.
set -eu
fsdp=$1 program=$2 ranks=$3
FSDP_TEST_FOLDER=$(mktemp -d "${TMPDIR:-/tmp}/fsdp-reshard-XXXXXX")
export FSDP_TEST_FOLDER
trap 'rm -rf "$FSDP_TEST_FOLDER"' EXIT
"$fsdp" run -n "$ranks" -- "$program" --gtest_brief=1 --gtest_filter=Worlds.Save
for others in 1 2 3 4; do
  echo "saved by $ranks, loaded by $others:"
  "$fsdp" run -n "$others" -- "$program" --gtest_brief=1 --gtest_filter=Worlds.Load
done
