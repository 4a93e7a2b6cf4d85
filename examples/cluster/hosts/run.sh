#!/bin/bash
# Trains on several hosts without a batch system: a launcher on each, started over ssh. The first host
# of the list is node 0. All hosts need the program, the data and the run's directory under the paths
# that this one has.
#
#   ./run.sh "node0 node1 node2" my.toml --dir runs/mine
#
# Ctrl-C saves and ends the run on all hosts. RANKS (gpu, or a number per host) and PORT change the
# defaults. See docs/cluster.md.
set -u
read -ra hosts <<< "$1"
shift

# The launchers prove to each other that they belong to this run. Over ssh's input nobody else sees it.
secret=$(head -c 32 /dev/urandom | base64)

# What a host does: the secret is its first line of input; the launcher is told to end by the second,
# or when the connection is lost.
there='
  read -r FSDP_SECRET; export FSDP_SECRET; exec 3<&0;
  "$@" < /dev/null & run=$!;
  { read -r line; kill -TERM $run; } <&3 > /dev/null 2>&1 & stopper=$!;
  wait $run; code=$?;
  kill $stopper 2> /dev/null; exit $code'
there=${there//$'\n'/ }  # its quotes are then those of any shell

inputs=() launchers=() node=0
for host in "${hosts[@]}"; do
  printf -v command '%q ' sh -c "$there" sh fsdp run -n "${RANKS:-gpu}" --nnodes "${#hosts[@]}" \
    --node-rank "$node" --master "${hosts[0]}:${PORT:-29500}" -- fsdp train "$@" --resume=auto
  # Ctrl-C is for this script alone: it would end ssh before the run has saved.
  exec {input}> >(trap '' INT; exec ssh -o BatchMode=yes "$host" "cd $(printf %q "$PWD") && $command")
  launchers+=($!) inputs+=("$input")
  echo "$secret" >&"$input"
  node=$((node + 1))
done

stop() { for input in "${inputs[@]}"; do echo stop >&"$input"; done 2> /dev/null; signalled=yes; }
trap stop INT TERM HUP
trap '' PIPE  # of a host that has ended already
code=0
for launcher in "${launchers[@]}"; do
  signalled=yes
  while [[ $signalled ]]; do  # a signal ends `wait` early
    signalled=
    wait "$launcher"
    ended=$?
  done
  ((code != 0)) || code=$ended
done
exit "$code"
