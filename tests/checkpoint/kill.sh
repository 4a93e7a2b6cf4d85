#!/bin/sh
# kill.sh FSDP PROGRAM [async]: two ranks save; one or both are killed at a system call of the save,
# for each choice of ranks and each call. `latest` must load after every kill.
set -u
fsdp=$1 program=$2
[ "${3:-}" = async ] && export FSDP_TEST_ASYNC=1
for rank in 0 1 every; do
  call=0
  while :; do
    FSDP_TEST_FOLDER=$(mktemp -d "${TMPDIR:-/tmp}/fsdp-kill-XXXXXX")
    export FSDP_TEST_FOLDER
    FSDP_TEST_RANK=$rank FSDP_TEST_CALL=$call \
      "$fsdp" run -n 2 -- "$program" --gtest_brief=1 --gtest_filter=KillRanks.Save >/dev/null 2>&1
    saved=$?
    "$program" --gtest_brief=1 --gtest_filter=KillRanks.Check
    checked=$?
    rm -rf "$FSDP_TEST_FOLDER"
    if [ $checked != 0 ]; then
      echo "rank $rank killed at call $call: no checkpoint loads"
      exit 1
    fi
    [ $saved = 0 ] && break
    call=$((call + 1))
    if [ $call -gt 100 ]; then
      echo "the save never succeeds"
      exit 1
    fi
  done
  echo "rank $rank: killed at each of $call calls"
  if [ $call -lt 4 ]; then
    echo "too few calls"
    exit 1
  fi
done
