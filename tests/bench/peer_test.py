"""The peer of the benchmarks, on the CPU: every variant trains the same model to the same loss, so all
variants do the same work. Needs a Python with torch; without one the test is skipped."""
import json, os, runpy, socket, sys, tempfile, traceback

os.environ["OMP_NUM_THREADS"] = "1"
try:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard  # noqa: F401
except ImportError:
    print("this python has no torch with FSDP2: FSDP_TEST_PYTHON names one; ./fsdp test makes it")
    sys.exit(77)

script = sys.argv[1]
llama = "--layers 2 --dim 32 --heads 4 --kv-heads 2 --vocab 64 --seq 16 --batch 2".split()
common = "--device cpu --dtype fp32 --init cpu --steps 1 --warmup 2".split()


def run(flags):
    """Runs the script in a forked process, which needn't import torch; returns what it printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryFile("w+") as printed:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
                sys.argv, sys.stdout = [script, *common, *flags], printed
                runpy.run_path(script, run_name="__main__")
                printed.flush()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, f"{flags}: exit {status}, see above"
        printed.seek(0)
        return printed.read()


def losses(*flags):
    line = json.loads(run(flags).strip().splitlines()[-1])
    assert line["threads"] == 1, line
    return line["loss0"], line["loss"], line["peer"]


first, last, _ = losses(*llama)
assert last < first, (first, last)
for flags, said in ((["--ac"], "+ac"), (["--ac=selective"], "+selective ac"), (["--offload"], "+offload")):
    a, b, peer = losses(*llama, *flags)
    assert (a, b) == (first, last), f"{flags}: {a} {b}, without it {first} {last}"
    assert peer.endswith(said), peer
mlp = ["--mlp", "64", "--batch", "4"]
assert losses(*mlp)[:2] == losses(*mlp, "--offload")[:2]
print("every variant came to the same loss")
