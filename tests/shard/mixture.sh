#!/usr/bin/env bash
# mixture.sh FSDP TESTS: three ranks save a mixture of experts, two load it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export FSDP_MIXTURE=$folder/checkpoint
"$1" run -n 3 -- "$2" --gtest_brief=1 --gtest_filter=MixtureCheckpoints.Save
"$1" run -n 2 -- "$2" --gtest_brief=1 --gtest_filter=MixtureCheckpoints.Load
