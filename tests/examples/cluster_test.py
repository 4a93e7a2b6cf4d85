#!/usr/bin/env python3
"""cluster_test.py SOURCE_DIR FSDP: the files of examples/cluster run a training, as far as can be seen
without a scheduler.

srun, scontrol, ssh and docker are played by small programs on PATH, and two nodes by two processes of
this machine. Each script starts a small run, is told to stop, and is started again by what it asked
for. The commands of the Kubernetes files run in the same way; a parser reads the files (python3-yaml).
Prints one line per fact.
"""
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

LIMIT = 90  # seconds for anything
USR1 = signal.SIGUSR1

# Plays srun for two nodes: starts TASKS processes and passes on the signal, as srun does.
SRUN = r"""#!/bin/bash
while [[ $1 == -* ]]; do echo "$1" >> "$TOP/srun-flags"; shift; done
pids=()
for ((task = 0; task < TASKS; ++task)); do
  SLURM_PROCID=$task SLURM_NODEID=$task SLURM_LOCALID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$TASKS \
    SLURM_STEP_NUM_NODES=$TASKS SLURM_STEP_NODELIST=127.0.0.1 "$@" &
  pids+=($!)
done
trap 'again=yes; kill -USR1 "${pids[@]}"' USR1
code=0
for pid in "${pids[@]}"; do
  again=yes
  while [[ $again ]]; do again=; wait "$pid"; ended=$?; done
  ((ended <= code)) || code=$ended
done
exit "$code"
"""
SCONTROL = r"""#!/bin/bash
case $1 in
  show) echo 127.0.0.1; echo 127.0.0.1 ;;
  requeue) echo "$2" >> "$TOP/requeued" ;;
esac
"""
SSH = r"""#!/bin/bash
while [[ $1 == -* ]]; do shift 2; done
echo "$1" >> "$TOP/ssh-hosts"
exec sh -c "$2"
"""
DOCKER = r"""#!/bin/bash
echo "$*" >> "$TOP/docker"
while [[ $1 != fsdp-image ]]; do shift; done
shift
exec fsdp "$@"
"""


def fact(text, holds, shown=""):
    if not holds:
        print(f"FAILED: {text}\n{shown}")
        sys.exit(1)
    print(f"ok: {text}")


def eventually(condition, what, process=None):
    deadline = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > deadline or (process and process.poll() is not None):
            raise AssertionError(f"never: {what}")
        time.sleep(0.02)


def is_free(port):
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def two_free_ports():
    """The first of two: rank 0's and the launchers'. Systems give those up here to nobody who asks
    for any, so no connection of another test gets them."""
    first = 10_000 + os.getpid() * 16 % 20_000
    return next(port for port in range(first, 32_000, 2) if is_free(port) and is_free(port + 1))


class Place:
    """A folder with the fake programs, a config and its text."""

    def __init__(self, top, fsdp):
        self.top, self.bin = pathlib.Path(top), pathlib.Path(top, "bin")
        self.bin.mkdir()
        fsdp = f'#!/bin/sh\nexec "{fsdp}" "$@"\n'
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "ssh": SSH, "docker": DOCKER,
                           "fsdp": fsdp}.items():
            path = self.bin / name
            path.write_text(text)
            path.chmod(0o755)
        words = ["shard", "gather", "unit", "rank", "reduce", "step", "mesh", "the", "of"]
        draw = random.Random(1)
        (self.top / "text").write_text(" ".join(draw.choice(words) for _ in range(6000)))
        self.config = self.top / "my.toml"
        self.config.write_text(f"""[model]
dim = 32
layers = 2
heads = 2
kv_heads = 1
ffn = 64
[data]
train = ["{self.top}/text"]
seq = 32
[train]
steps = 100_000
batch = 12
eval_batches = 2
sample_tokens = 20
[optim]
warmup_steps = 0
[log]
every = 1
""")

    def environment(self, **more):
        kept = {name: value for name, value in os.environ.items()
                if not name.startswith(("SLURM_", "FSDP_", "OMPI_", "PMI_"))
                and name not in {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}}
        return {**kept, "PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(self.top),
                "TOP": str(self.top), "OMP_NUM_THREADS": "1", "FSDP_BACKEND": "shm", **more}

    def start(self, command, **more):
        log = open(self.top / "log", "w")
        return subprocess.Popen([str(word) for word in command], env=self.environment(**more),
                                cwd=self.top, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                start_new_session=True)

    def said(self):
        return (self.top / "log").read_text()

    def finish(self, process):
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            print(self.said())
            raise

    def is_training(self, run):
        metrics = self.top / run / "metrics.jsonl"
        return metrics.exists() and '"step":3' in metrics.read_text()

    def steps(self, run):
        """Of the latest checkpoint."""
        return int(os.readlink(self.top / run / "checkpoints/latest").split("-")[-1])


def stopped_and_resumed(place, what, command, run, stop, stopped, again, **more):
    """Starts a run, stops it by `stop`, and starts it again with two more steps."""
    process = place.start(command, **more)
    try:
        eventually(lambda: place.is_training(run), f"{what} trains", process)
    except AssertionError as problem:
        fact(str(problem), False, place.said())
    stop(process)
    code = place.finish(process)
    fact(f"{what}: a run that is told to stop saves and ends with {stopped}", code == stopped,
         f"code {code}\n{place.said()}")
    done = place.steps(run)
    process = place.start([*command, *again(done + 2)], **more, SLURM_RESTART_COUNT="1")
    code = place.finish(process)
    fact(f"{what}: started again it resumes and ends with 0", code == 0,
         f"code {code}\n{place.said()}")
    fact(f"{what}: it resumed", f"resumed    after step {done}" in place.said(), place.said())
    fact(f"{what}: it did all steps", place.steps(run) == done + 2)


def flags(steps):
    return ["--steps", steps]


def check_slurm(place, root, script):
    job = next(job for job in random.sample(range(1, 6000), 5999)
               if is_free(20000 + job * 2) and is_free(20001 + job * 2))
    slurm = {"SLURM_JOB_ID": str(job), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[0-1]",
             "TASKS": "2", "RANKS": "1", "RESTARTS": "0", "SLURM_CPUS_PER_TASK": "1"}
    requeued = place.top / "requeued"
    path = root / "examples/cluster/slurm" / script
    text = path.read_text()
    fact(f"{script} asks for a signal and to be requeued",
         "#SBATCH --requeue\n" in text and "#SBATCH --signal=B:USR1@300\n" in text)
    command = ["bash", path, place.config, "--dir", script]
    requests = []

    def again(steps):
        requests.append(requeued.read_text() if requeued.exists() else "")
        requeued.unlink(missing_ok=True)
        return flags(steps)

    stopped_and_resumed(place, script, command, script, lambda process: process.send_signal(USR1),
                        75, again, **slurm)
    fact(f"{script}: a stopped run is requeued", requests == [f"{job}\n"], requests)
    fact(f"{script}: one that is done isn't", not requeued.exists())
    secret = place.top / f".fsdp-secret-{job}"
    fact(f"{script}: the secret is the user's alone",
         secret.stat().st_mode & 0o077 == 0 and len(secret.read_text()) > 30)
    process = place.start(["bash", path, place.config, "--dir", "other", "--optim.lr", "soon"], **slurm)
    fact(f"{script}: a mistake in the config isn't tried again",
         place.finish(process) == 2 and not requeued.exists(), place.said())


def check_hosts(place, root):
    script = root / "examples/cluster/hosts/run.sh"
    port = two_free_ports()
    command = ["bash", script, "127.0.0.1 localhost", place.config, "--dir", "hosts"]
    stopped_and_resumed(place, "hosts/run.sh", command, "hosts",
                        lambda process: process.send_signal(signal.SIGINT), 75, flags, RANKS="1",
                        PORT=str(port))
    asked = (place.top / "ssh-hosts").read_text().split()
    fact("hosts/run.sh asks every host", sorted(set(asked)) == ["127.0.0.1", "localhost"], asked)


def check_container(place, root):
    script = root / "examples/cluster/container/run.sh"
    command = ["sh", script, place.config, "--dir", "container", "--ranks", "1"]
    stopped_and_resumed(place, "container/run.sh", command, "container",
                        lambda process: process.send_signal(signal.SIGTERM), 75, flags,
                        IMAGE="fsdp-image")
    said = (place.top / "docker").read_text()
    fact("container/run.sh makes room in /dev/shm and time to save",
         "--shm-size 16g" in said and "--stop-timeout 600" in said, said)


def check_kubernetes(place, root):
    folder = root / "examples/cluster/kubernetes"
    try:
        import yaml
    except ImportError:
        print("skipped: there is no python3-yaml to read the Kubernetes files")
        return
    (job,) = yaml.safe_load_all((folder / "job.yaml").read_text())
    service, indexed = yaml.safe_load_all((folder / "indexed-job.yaml").read_text())
    for name, one in {"job.yaml": job, "indexed-job.yaml": indexed}.items():
        spec, pod = one["spec"], one["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        fact(f"{name} is a Job whose volumes and mounts fit",
             (one["apiVersion"], one["kind"]) == ("batch/v1", "Job")
             and mounted == {volume["name"] for volume in pod["volumes"]})
        rules = {rule["action"]: rule["onExitCodes"]["values"]
                 for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
        fact(f"{name} goes on after 75 and gives up after 2",
             rules == {"Ignore": [75], "FailJob": [2, 65, 71, 126, 127]}
             and pod["restartPolicy"] == "Never", rules)
    pod = indexed["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    name = indexed["metadata"]["name"]
    fact("indexed-job.yaml: pod 0 has a name by the Service",
         service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"]
         and service["spec"]["selector"] == {"job-name": name}
         and variables["MASTER"].startswith(f"{name}-0.{pod['subdomain']}:"))
    port = int(variables["MASTER"].split(":")[1])
    fact("indexed-job.yaml: it opens both ports, and starts as many pods as it has nodes",
         [one["containerPort"] for one in container["ports"]] == [port, port + 1]
         and int(variables["NODES"]) == indexed["spec"]["completions"]
         == indexed["spec"]["parallelism"])
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    fact("indexed-job.yaml: the secret is open to one user alone",
         volumes["secret"]["secret"]["defaultMode"] & 0o077 == 0)

    # Its command, in two "pods" of this machine.
    secret = place.top / "pods-secret"
    secret.write_text("a secret for the pods of one run\n")
    secret.chmod(0o600)
    port = two_free_ports()
    pods = place.top / "pods.sh"  # starts both, and passes on the signal as a kubelet would
    pods.write_text("""for index in 0 1; do
  JOB_COMPLETION_INDEX=$index sh -c "$COMMAND" & pids="$pids $!"
done
trap 'kill -TERM $pids' TERM
code=0
for pid in $pids; do
  while :; do wait $pid; ended=$?; kill -0 $pid 2> /dev/null || break; done
  wait $pid 2> /dev/null; late=$?; [ $late = 127 ] || ended=$late
  [ $ended -le $code ] || code=$ended
done
exit $code
""")
    shared = {"COMMAND": container["args"][0], "NODES": "2", "RANKS": "1",
              "MASTER": f"127.0.0.1:{port}", "DIR": "pods", "FSDP_SECRET_FILE": str(secret)}

    def again(steps):
        text = place.config.read_text().replace("steps = 100_000", f"steps = {steps}")
        (place.top / "less.toml").write_text(text)
        return []

    stopped_and_resumed(place, "indexed-job.yaml", ["bash", "-c", f'CONFIG=$(ls {place.top}/less.toml '
                        f'2> /dev/null || echo {place.config}); export CONFIG; . {pods}'], "pods",
                        lambda process: process.send_signal(signal.SIGTERM), 75, again, **shared)


def main(arguments):
    if len(arguments) != 2:
        print("usage: cluster_test.py SOURCE_DIR FSDP", file=sys.stderr)
        return 2
    root, fsdp = pathlib.Path(arguments[0]).resolve(), pathlib.Path(arguments[1]).resolve()
    for script in sorted((root / "examples/cluster").rglob("*")):
        if script.suffix in {".sbatch", ".sh"}:
            shell = "bash" if script.read_text().startswith("#!/bin/bash") else "sh"
            parsed = subprocess.run([shell, "-n", script], capture_output=True, text=True)
            fact(f"{script.name} is a script for {shell}", parsed.returncode == 0, parsed.stderr)
            if shutil.which("shellcheck"):
                found = subprocess.run(["shellcheck", "--severity=warning", script], capture_output=True, text=True)
                fact(f"shellcheck likes {script.name}", found.returncode == 0, found.stdout)
    with tempfile.TemporaryDirectory() as top:
        place = Place(top, fsdp)
        check_slurm(place, root, "srun.sbatch")
        check_slurm(place, root, "fsdp-run.sbatch")
        check_hosts(place, root)
        check_container(place, root)
        check_kubernetes(place, root)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
