#!/usr/bin/env python3
"""recovery.py FSDP [--ranks N] [--kills N] [-- FLAGS...]: kills ranks of a run, and
measures the time from SIGKILL to the end of the next step.

Kills one rank at a time, then all at once, then one at a time of a run on two nodes (two launchers on
this machine). Prints a line per kill, then the medians. The losses are compared with those of an
undisturbed run. FLAGS are for fsdp train.
"""
import argparse
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

WAIT = 120  # seconds, for anything


def until(condition, what):
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        if (found := condition()) is not None:
            return found
        time.sleep(0.002)
    sys.exit(f"recovery.py: {what} didn't happen within {WAIT} s.")


def steps(metrics):
    """(inode, steps) of the lines so far."""
    try:
        with open(metrics) as file:
            lines = file.read().split("\n")[:-1]
            return os.fstat(file.fileno()).st_ino, [json.loads(line)["step"] for line in lines]
    except FileNotFoundError:
        return 0, []


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open()]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def pid_of(folder, rank):
    return int((folder / f"rank-{rank}").read_text())


def seconds_to_the_next_step(metrics, pids):
    inode, _ = steps(metrics)
    begun = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)

    def gone_on():
        now, done = steps(metrics)  # a start replaces the file by the lines up to its checkpoint
        return (now, len(done)) if now != inode else None

    now, kept = until(gone_on, "a restart")
    until(lambda: True if len(steps(metrics)[1]) > kept else None, "a step after the restart")
    return time.monotonic() - begun


def launch(arguments, folder, nodes, train):
    """The launchers of a run: one per node, all on this machine."""
    master, control = free_port(), free_port()
    runs = []
    for node in range(nodes):
        flags = ["--nnodes", str(nodes), "--node-rank", str(node), "--master", f"127.0.0.1:{master}",
                 "--control-port", str(control)] if nodes > 1 else []
        runs.append(subprocess.Popen(
            [arguments.fsdp, "run", "-n", str(arguments.ranks // nodes), "--max-restarts", "1000", *flags,
             "--", "sh", "-c", 'echo $$ > "$0"/rank-$RANK; exec "$@"', str(folder), *train, "--dir",
             str(folder / "hurt")],
            env={**os.environ, "FSDP_SECRET": "only for this machine"},
            stdout=(folder / f"out-{node}").open("w"), stderr=subprocess.STDOUT))
    return runs


def measure(arguments, folder, nodes, kinds, train):
    """Seconds of each kill, by kind; the run then ends."""
    folder.mkdir()
    runs = launch(arguments, folder, nodes, train)
    metrics = folder / "hurt/metrics.jsonl"
    took = {what: [] for what in kinds}
    for kill in range(len(kinds) * arguments.kills):
        what = kinds[kill // arguments.kills]
        first = (steps(metrics)[1] or [0])[-1]
        until(lambda: True if (steps(metrics)[1] or [0])[-1] >= first + 20 else None, "20 steps")
        dead = range(arguments.ranks) if what == "all ranks" else [kill % arguments.ranks]
        took[what].append(seconds_to_the_next_step(metrics, [pid_of(folder, rank) for rank in dead]))
        print(f"{what:25} {took[what][-1]:.2f} s", flush=True)
    for node, run in enumerate(runs):
        if run.wait(timeout=3600) != 0:
            sys.exit((folder / f"out-{node}").read_text()[-4000:])
    return took


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("fsdp")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5, help="of each kind")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("flags", nargs="*")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        train = [arguments.fsdp, "train", "--log.every", "100", "--steps", str(arguments.steps),
                 "--train.sample_tokens", "0", *arguments.flags]
        took = measure(arguments, folder / "one", 1, ["one rank", "all ranks"], train)
        took |= measure(arguments, folder / "two", 2, ["one rank, on two nodes"], train)
        subprocess.run([arguments.fsdp, "run", "-n", str(arguments.ranks), "--", *train, "--dir",
                        str(folder / "whole")], check=True, stdout=subprocess.DEVNULL)
        for what, times in took.items():
            print(f"{what:25} median {statistics.median(times):.2f} s, longest {max(times):.2f} s")
        whole = losses(folder / "whole")
        same = all(losses(folder / run / "hurt") == whole for run in ("one", "two"))
        print(f"{'losses':25} " + ("those of the undisturbed run, bit for bit" if same else "DIFFER"))
        sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
