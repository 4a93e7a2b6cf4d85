#!/usr/bin/env python3
"""recovery.py FSDP [--ranks N] [--kills N] [-- FLAGS...]: kills ranks of a run, and
measures the time from SIGKILL to the end of the next step.

Kills one rank at a time, then all at once. Prints a line per kill, then the medians. The losses are
compared with those of an undisturbed run. FLAGS are for fsdp train.
"""
import argparse
import json
import os
import pathlib
import signal
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("fsdp")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5, help="of one rank, and of all ranks")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("flags", nargs="*")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        train = [arguments.fsdp, "train", "--log.every", "100", "--steps", str(arguments.steps),
                 "--train.sample_tokens", "0", *arguments.flags]
        run = subprocess.Popen(
            [arguments.fsdp, "run", "-n", str(arguments.ranks), "--max-restarts", "1000", "--", "sh", "-c",
             'echo $$ > "$0"/rank-$RANK; exec "$@"', name, *train, "--dir", str(folder / "hurt")],
            stdout=(folder / "out").open("w"), stderr=subprocess.STDOUT)
        metrics = folder / "hurt/metrics.jsonl"
        took = {"one rank": [], "all ranks": []}
        for kill in range(2 * arguments.kills):
            what = "one rank" if kill < arguments.kills else "all ranks"
            first = steps(metrics)[1][-1:] or [0]
            until(lambda: True if (steps(metrics)[1] or [0])[-1] >= first[0] + 20 else None, "20 steps")
            dead = [kill % arguments.ranks] if what == "one rank" else range(arguments.ranks)
            took[what].append(seconds_to_the_next_step(metrics, [pid_of(folder, rank) for rank in dead]))
            print(f"{what:10} {took[what][-1]:.2f} s", flush=True)
        if run.wait(timeout=3600) != 0:
            sys.exit((folder / "out").read_text()[-4000:])
        subprocess.run([arguments.fsdp, "run", "-n", str(arguments.ranks), "--", *train, "--dir",
                        str(folder / "whole")], check=True, stdout=subprocess.DEVNULL)
        for what, times in took.items():
            print(f"{what:10} median {statistics.median(times):.2f} s, longest {max(times):.2f} s")
        same = losses(folder / "hurt") == losses(folder / "whole")
        print("losses     " + ("those of the undisturbed run, bit for bit" if same else "DIFFER"))
        sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
