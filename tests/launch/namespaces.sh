#!/bin/bash
# fsdp run --nnodes 2 as on several machines: launchers in network namespaces of their own, on a switch
# whose cables the test can pull. The namespaces have no names and end with their processes, so
# nothing is left behind however this script ends.
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
declare -A machine=([0]=$$)  # a process that holds its namespace; our own is node 0's
trap 'rm -rf "$folder"; unset "machine[0]"; kill ${machine[*]} 2> /dev/null' EXIT
failures=0
fail() {
  echo "FAILED: $*"
  failures=$((failures + 1))
  tail -n 30 "$folder"/*.txt
}
on() {
  local number=$1
  shift
  nsenter --target ${machine[$number]} --net "$@"
}

ip link set lo up
ip link add switch type bridge forward_delay 0 || {
  echo "SKIPPED, NOT PASSED: this kernel has no bridges (the module bridge)."
  exit 77
}
ip addr add 10.77.0.1/24 dev switch && ip link set switch up || { echo "FAILED: no address."; exit 1; }
# Machine 1 has the address 10.77.0.2, machine 2 10.77.0.3. cable1 and cable2 lead there.
for number in 1 2; do
  unshare --net sleep infinity &
  machine[$number]=$!
  until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do :; done
  ip link add cable$number type veth peer name port netns $! &&
    ip link set cable$number master switch up || { echo "FAILED: can't create a veth pair."; exit 1; }
  on $number ip addr add 10.77.0.$((number + 1))/24 dev port
  on $number ip link set port up
  on $number ip link set lo up
done

secret=(--secret-file "$folder/secret")
(umask 077; echo "the secret of these two nodes" > "$folder/secret")

# both CODE FLAGS... -- PROGRAM...: runs PROGRAM on two nodes and expects exit code CODE from both.
both() {
  local expected=$1 first second
  shift
  "$fsdp" run --nnodes 2 --node-rank 0 --master 10.77.0.1:29500 "${secret[@]}" "$@" > "$folder/0.txt" 2>&1 &
  first=$!
  on 1 "$fsdp" run --nnodes 2 --node-rank 1 --master 10.77.0.1:29500 "${secret[@]}" "$@" > "$folder/1.txt" 2>&1 &
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
export FSDP_TEST_DIR=$folder FSDP_FLIGHT_DIR=$folder/flight FSDP_BACKEND=shm FSDP_TIMEOUT=60
both 0 -n 2 -- "$program" collectives
for rank in 0 1 2 3; do grep -q "^ok .* fsdp run" "$folder/rank-$rank" || fail "rank $rank didn't finish"; done
rm -f "$folder"/rank-*

echo "== a node with another secret is refused, and ends; node 0 goes on waiting"
"$fsdp" run --nnodes 2 --node-rank 0 --master 10.77.0.1:29500 "${secret[@]}" --rendezvous-timeout 6 true \
  > "$folder/0.txt" 2>&1 &
first=$!
FSDP_SECRET="another secret of a node" on 1 "$fsdp" run --nnodes 2 --node-rank 1 --master 10.77.0.1:29500 \
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

# --- faults ---

# Each start of a rank leaves a file that names its run, node, start and world.
member='echo $$ > $0/draft.$1.$GROUP_RANK
mv $0/draft.$1.$GROUP_RANK $0/$1.node$GROUP_RANK.start$TORCHELASTIC_RESTART_COUNT.of$WORLD_SIZE
until [ -e $0/$1.done ]; do sleep 0.05; done'
declare -A launcher port=([ends]=29500 [cut]=29510 [taken]=29520 [reset]=29530 [spare]=29540 [shrinks]=29550)

# start RUN MACHINE NODE FLAGS...: a launcher on that machine.
start() {
  local run=$1 number=$2 node=$3
  shift 3
  nsenter --target ${machine[$number]} --net "$fsdp" run --node-rank $node \
    --master 10.77.0.1:${port[$run]} "${secret[@]}" "$@" -- sh -c "$member" "$folder" $run \
    > "$folder/$run.$number.txt" 2>&1 &
  launcher[$run.$number]=$!
}
# await WHAT COMMAND...: until it succeeds, for a minute at most.
await() {
  local what=$1 until=$((SECONDS + 60))
  shift
  until "$@"; do
    [ $SECONDS -lt $until ] || { fail "$what didn't happen within a minute"; return 1; }
    sleep 0.05
  done
}
# starts RUN NUMBER WORLD NODE...: waits for the start of these nodes with that number.
starts() {
  local run=$1 number=$2 world=$3 node
  for node in "${@:4}"; do
    await "start $number of node $node of the run $run" \
      test -e "$folder/$run.node$node.start$number.of$world" || return
  done
}
# ends RUN CODE MACHINE...: the launchers there end with this exit code.
ends() {
  local run=$1 code=$2 number
  for number in "${@:3}"; do
    await "the end of the run $run on machine $number" \
      eval "! kill -0 ${launcher[$run.$number]} 2> /dev/null" || return
    wait ${launcher[$run.$number]}
    local got=$?
    [ $got = $code ] || fail "run $run ended with $got on machine $number instead of $code"
  done
}
says() { grep -q -- "$2" "$folder/$1.txt"; }
# Kills all processes of a machine at once, as a reset does.
reset() {
  local net pid name left=1
  net=$(readlink /proc/${machine[$1]}/ns/net)
  while [ $left = 1 ]; do
    left=0
    for pid in $(cd /proc && ls -d [0-9]*); do
      [ $pid != ${machine[$1]} ] && [ "$(readlink /proc/$pid/ns/net)" = $net ] &&
        kill -KILL $pid 2> /dev/null && left=1
    done
  done
  for name in "${!launcher[@]}"; do
    [[ $name = *.$1 ]] && wait ${launcher[$name]}
  done
} 2> /dev/null
silent="is gone: it gave no sign of life for 8 s"

echo "== a pulled cable: three runs notice, and one without restarts ends"
for number in 0 1; do
  start ends $number $number --nnodes 2
  start cut $number $number --nnodes 2 --max-restarts 1
  start taken $number $number --nnodes 2 --max-restarts 1
done
start taken 2 spare --nnodes 2
for run in ends cut taken; do starts $run 0 2 0 1; done
ip link set cable1 down
ends ends 69 0 1
for run in ends cut taken; do
  await "node 0's notice" says $run.0 "the launcher of node 1 (10.77.0.2) $silent"
  await "node 1's notice" says $run.1 "the launcher of node 0 (10.77.0.1) $silent"
done
for node in 0 1; do
  kill -0 "$(cat "$folder/ends.node$node.start0.of2")" 2> /dev/null && fail "rank $node still runs"
done

echo "== the cable is back: node 1 connects again by itself, and waits where a spare has its place"
starts taken 1 2 0 1
ip link set cable1 up
starts cut 1 2 0 1
await "node 1's wait for a place" says taken.1 "connected to node 0; waiting for the next start"
touch "$folder/cut.done" "$folder/taken.done"
ends cut 0 0 1
ends taken 0 0 1 2
says taken.1 "another node had taken this one's place" || fail "node 1 doesn't say who has its place"

echo "== a reset: node 1's launcher is started again with the same command, and the run goes on"
for number in 0 1; do start reset $number $number --nnodes 2 --max-restarts 1; done
starts reset 0 2 0 1
reset 1
await "node 0's notice" says reset.0 "the launcher of node 1 (10.77.0.2) is gone"
start reset 1 1 --nnodes 2 --max-restarts 1
starts reset 1 2 0 1
touch "$folder/reset.done"
ends reset 0 0 1

echo "== a power-off: a spare takes the place; a run without one goes on with fewer nodes"
for number in 0 1; do
  start spare $number $number --nnodes 2 --max-restarts 1
  start shrinks $number $number --nnodes 1:2 --max-restarts 1 --rendezvous-timeout 6
done
start spare 2 spare --nnodes 2
starts spare 0 2 0 1
starts shrinks 0 2 0 1
ip link set cable1 down
reset 1
starts spare 1 2 0 1
starts shrinks 1 1 0
for run in spare shrinks; do says $run.0 "the launcher of node 1 (10.77.0.2) $silent" ||
  fail "the run $run doesn't say that node 1 is silent"; done
says shrinks.0 "node 1 didn't join within 6 s: going on with 1 of 2 nodes" ||
  fail "the run that shrinks doesn't say so"
touch "$folder/spare.done" "$folder/shrinks.done"
ends spare 0 0 2
ends shrinks 0 0

[ $failures = 0 ] && echo PASSED
exit $((failures > 0))
