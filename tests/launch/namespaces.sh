#!/bin/bash
# fsdp run --nnodes 2 as on two machines: two launchers in two network namespaces, joined by a veth
# cable that the test can pull. The namespaces have no names and end with their processes, so nothing
# is left behind however this script ends.
#
# usage: namespaces.sh FSDP RANK_PROGRAM (the binaries)
# exit: 0 passed, 77 no permission to create namespaces, else failed
set -u
fsdp=$1
program=$2

for tool in unshare nsenter ip; do
  command -v $tool > /dev/null || { echo "FAILED: this test needs $tool (util-linux, iproute2)."; exit 1; }
done
if [ "${FSDP_IN_NAMESPACE:-}" = "" ]; then
  export FSDP_IN_NAMESPACE=1
  if unshare --net true 2> /dev/null; then
    exec unshare --net --pid --fork --kill-child --mount-proc "$0" "$@"
  elif unshare --user --map-root-user --net true 2> /dev/null; then
    exec unshare --user --map-root-user --net --pid --fork --kill-child --mount-proc "$0" "$@"
  fi
  echo "SKIPPED, NOT PASSED: network namespaces need root, or user namespaces for all users"
  echo "  (sysctl kernel.unprivileged_userns_clone=1 or kernel.apparmor_restrict_unprivileged_userns=0)."
  exit 77
fi

folder=$(mktemp -d)
unshare --net sleep infinity &
other=$!
trap 'rm -rf "$folder"; kill $other' EXIT
failures=0
fail() {
  echo "FAILED: $*"
  failures=$((failures + 1))
  tail -n 30 "$folder"/*.txt
}

until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do :; done
there() { nsenter --target $other --net "$@"; }
ip link add cable0 type veth peer name cable1 netns $other || { echo "FAILED: can't create a veth pair."; exit 1; }
ip addr add 10.77.0.1/24 dev cable0 && ip link set cable0 up && ip link set lo up
there ip addr add 10.77.0.2/24 dev cable1 && there ip link set cable1 up && there ip link set lo up

secret=(--secret-file "$folder/secret")
(umask 077; echo "the secret of these two nodes" > "$folder/secret")

# both CODE FLAGS... -- PROGRAM...: runs PROGRAM on two nodes and expects exit code CODE from both.
both() {
  local expected=$1 first second
  shift
  "$fsdp" run --nnodes 2 --node-rank 0 --master 10.77.0.1:29500 "${secret[@]}" "$@" > "$folder/0.txt" 2>&1 &
  first=$!
  there "$fsdp" run --nnodes 2 --node-rank 1 --master 10.77.0.1:29500 "${secret[@]}" "$@" > "$folder/1.txt" 2>&1 &
  second=$!
  wait $first; first=$?
  wait $second; second=$?
  [ $first = "$expected" ] && [ $second = "$expected" ] || fail "exit codes $first and $second instead of $expected"
}
shows() { grep -q -- "$2" "$folder/$1.txt" || fail "node $1 doesn't show: $2"; }

echo "== two nodes of two ranks"
both 0 -n 2 -- sh -c 'echo $RANK of $WORLD_SIZE, $LOCAL_RANK on $GROUP_RANK, master $MASTER_ADDR'
for rank in 0 1; do shows 0 "\[$rank\] $rank of 4, $rank on 0, master 10.77.0.1"; done
for rank in 2 3; do shows 1 "\[$rank\] $rank of 4, $((rank - 2)) on 1, master 10.77.0.1"; done

echo "== fsdp::init() joins them into one world (shm works because both share one kernel)"
export FSDP_TEST_DIR=$folder FSDP_BACKEND=shm FSDP_TIMEOUT=60
both 0 -n 2 -- "$program" collectives
for rank in 0 1 2 3; do grep -q "^ok .* fsdp run" "$folder/rank-$rank" || fail "rank $rank didn't finish"; done
rm -f "$folder"/rank-*

echo "== a node with another secret is refused, and ends; node 0 goes on waiting"
"$fsdp" run --nnodes 2 --node-rank 0 --master 10.77.0.1:29500 "${secret[@]}" --rendezvous-timeout 6 true \
  > "$folder/0.txt" 2>&1 &
first=$!
FSDP_SECRET="another secret of a node" there "$fsdp" run --nnodes 2 --node-rank 1 --master 10.77.0.1:29500 \
  --rendezvous-timeout 3 true > "$folder/1.txt" 2>&1 && fail "node 1 joined with another secret"
wait $first && fail "node 0 started without node 1"
shows 0 "node 1 didn't join within 6 s"
shows 1 "doesn't know the secret of this run"

echo "== without a secret it works, and node 0 warns"
secret=()
both 0 -n 1 -- "$program" collectives
shows 0 "the nodes have no secret"
for rank in 0 1; do grep -q "^ok .* fsdp run" "$folder/rank-$rank" || fail "rank $rank didn't finish"; done
rm -f "$folder"/rank-*
secret=(--secret-file "$folder/secret")

echo "== if FSDP_HOST_ID says two hosts, shm names the backends to use instead"
both 3 -n 1 --grace 60 -- sh -c "FSDP_HOST_ID=host\$GROUP_RANK exec $program fault none 0"
grep -q "use the mpi backend (CPU clusters) or nccl (GPUs)" "$folder/0.txt" "$folder/1.txt" ||
  fail "no node names mpi and nccl"

echo "== a rank of node 1 fails: both nodes end with its exit code"
both 9 -n 2 -- sh -c 'if [ $RANK = 3 ]; then echo last words; exit 9; fi; sleep 1000'
for node in 0 1; do
  shows $node "error: rank 3 (pid [0-9]*) on node 1 exited with code 9"
  shows $node "    last words"
done

echo "== with --max-restarts, both restart"
both 0 -n 1 --max-restarts 1 -- sh -c 'test $TORCHELASTIC_RESTART_COUNT = 1 || { test $RANK = 1 && exit 9; sleep 1000; }'
for node in 0 1; do shows $node "restart 1 of 1"; done

echo "== the cable is pulled: both notice within a minute and end"
(
  until [ -s "$folder/rank-0" ] && [ -s "$folder/rank-1" ]; do sleep 0.05; done
  ip link set cable0 down
) &
both 69 -n 1 -- sh -c "echo \$\$ > $folder/rank-\$RANK; exec sleep 1000"
shows 0 "the launcher of node 1 (10.77.0.2) is gone"
shows 1 "the launcher of node 0 (10.77.0.1) is gone"
for rank in 0 1; do kill -0 "$(cat "$folder/rank-$rank")" 2> /dev/null && fail "rank $rank is still running"; done

[ $failures = 0 ] && echo PASSED
exit $((failures > 0))
