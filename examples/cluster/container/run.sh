#!/bin/sh
# Trains in a container, on all GPUs of this machine. `docker stop` and Ctrl-C save; the same command
# again resumes. IMAGE and DOCKER choose another image (docker build -t fsdp .) and podman.
#
#   ./run.sh my.toml --dir runs/mine
#
# What the flags are for is in docs/cluster.md.
set -eu
gpus=
if [ -e /dev/nvidia0 ]; then gpus='--gpus all'; fi
exec "${DOCKER:-docker}" run --rm --init --stop-timeout 600 --user "$(id -u):$(id -g)" $gpus \
  --shm-size 16g --ulimit memlock=-1 --ulimit nofile=65536 \
  --volume "$PWD:/work" --workdir /work "${IMAGE:-fsdp}" train "$@" --resume=auto
