#!/usr/bin/env python3
"""torch_interop.py FSDP PROGRAM: PyTorch reads our checkpoints, and we read PyTorch's.

PROGRAM (torch_interop_test.cpp) has the same model in C++. It trains on two ranks and saves; the
real torch.distributed.checkpoint loads that into a plain module and into FSDP2 modules of two
ranks. Then FSDP2 trains and saves in float32 and bfloat16, and PROGRAM loads that on one and on
three ranks. Every tensor must match bit for bit. Exits with 77 if torch is missing.
"""
import io
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import zipfile

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # gloo and CPUs, even on a machine with GPUs

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
except ImportError as problem:
    print(f"skipped: {problem}")
    sys.exit(77)

GROUPS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


class Net(torch.nn.Module):
    """The twin of Net in torch_interop_test.cpp."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))
        self.frozen = torch.nn.Parameter(torch.arange(7.0), requires_grad=False)
        self.embedding = torch.nn.Embedding(29, 16)
        self.first = torch.nn.Linear(16, 33)
        self.conv = torch.nn.Conv2d(3, 5, 3)
        self.head = torch.nn.Linear(16, 29, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.arange(3.0))
        self.register_buffer("count", torch.tensor(4, dtype=torch.int64))

    def forward(self, x):
        trained = (p for p in self.parameters() if p.requires_grad)
        return sum(((p.float() - x) ** 2).sum() for p in trained)


def make(sharded, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = Net().to(dtype)
    if sharded:  # FSDP2 supports no scalar or empty parameters
        fully_shard(model, ignored_params={model.scale, model.empty})
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}],
                                  foreach=False, **GROUPS)
    return model, optimizer


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def snapshot(model, optimizer):
    """Like snapshot() in trained.h."""
    found = {"model." + name: whole(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for state, value in optimizer.state.get(parameter, {}).items():
            if state == "step":
                found["steps." + name] = torch.tensor(int(value))
            else:
                found[f"state.{name}.{state}"] = whole(value)
    return found


def expect_equal(actual, expected):
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, (name, actual[name].dtype, value.dtype)
        assert torch.equal(actual[name], value), (name, actual[name], value)


def load(folder, model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    state["extra"] = {"step": 0, "loss": 0.0, "name": "", "done": False,
                      "order": torch.zeros(3, dtype=torch.int64), "rank1": {"seed": 0}}
    dcp.load(state, checkpoint_id=folder / "ours")
    set_state_dict(model, optimizer, model_state_dict=model_state,
                   optim_state_dict=optimizer_state)
    extra = state["extra"]
    assert extra["step"] == 2**40 and extra["loss"] == 0.1 and extra["done"] is True, extra
    assert extra["name"] == "grüße" and extra["order"].tolist() == [3, 1, 2], extra
    assert extra["rank1"]["seed"] == 101, extra
    for group, decay in zip(optimizer.param_groups, (0.1, 0.0)):
        assert group["lr"] == 0.02 and group["betas"] == (0.8, 0.95), group
        assert group["eps"] == 1e-6 and group["weight_decay"] == decay, group


def train(model, optimizer):
    for step in range(3):
        model(torch.tensor(0.1 * step + dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


def rank_main(rank, folder):
    folder = pathlib.Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    expected = torch.load(folder / "ours.whole", weights_only=False)
    model, optimizer = make(sharded=True, seed=1)
    load(folder, model, optimizer)
    expect_equal(snapshot(model, optimizer), expected)

    for dtype in (torch.float32, torch.bfloat16):
        model, optimizer = make(sharded=True, dtype=dtype)
        train(model, optimizer)
        model.scale.data.fill_(0.25)  # not sharded: its gradient differs between ranks
        for value in optimizer.state[model.scale].values():
            value.fill_(3.0)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        name = str(dtype).removeprefix("torch.")
        dcp.save({"model": model_state, "optim": optimizer_state,
                  "extra": {"step": 3, "text": "x", "odd": {1, 2}}}, checkpoint_id=folder / name)
        found = snapshot(model, optimizer)
        if rank == 0:
            torch.save(found, folder / f"{name}.whole")
    dist.barrier()
    os._exit(0)  # the orderly end of a process with gloo's threads sometimes aborts in PyTorch


def main():
    fsdp, program = sys.argv[1:3]
    with tempfile.TemporaryDirectory(prefix="fsdp-torch-") as temporary:
        folder = pathlib.Path(temporary)
        environment = {**os.environ, "FSDP_TEST_FOLDER": temporary}

        def ours(ranks, test):
            command = [fsdp, "run", "-n", str(ranks), "--", program, "--gtest_brief=1",
                       "--gtest_filter=" + test]
            subprocess.run(command, check=True, env=environment)

        ours(2, "Torch.Write")
        with open(folder / "ours" / ".metadata", "rb") as file:
            metadata = pickle.load(file)
        expected = torch.load(folder / "ours.whole", weights_only=False)
        assert any(len(entry.chunks) > 1 for name, entry in metadata.state_dict_metadata.items()
                   if name.startswith("model.") and entry.size), "nothing was sharded"
        assert "optim.state.frozen.exp_avg" not in metadata.state_dict_metadata
        for index, info in metadata.storage_data.items():
            item = (folder / "ours" / info.relative_path).read_bytes()[info.offset:][:info.length]
            archive = zipfile.ZipFile(io.BytesIO(item))
            assert archive.testzip() is None, f"{index}: wrong CRC-32"
            assert "archive/data.pkl" in archive.namelist(), index
        model, optimizer = make(sharded=False, seed=1)
        load(folder, model, optimizer)
        expect_equal(snapshot(model, optimizer), expected)
        assert model.head.weight is model.embedding.weight
        # Everything at once, as converters do.
        everything = {}
        dcp.state_dict_loader._load_state_dict(
            everything, storage_reader=dcp.FileSystemReader(folder / "ours"),
            planner=dcp.default_planner._EmptyStateDictLoadPlanner(), no_dist=True)
        assert torch.equal(everything["model"]["first.weight"], expected["model.first.weight"])
        assert everything["optim"]["param_groups"][1]["params"], everything["optim"]
        print("a plain module loads our checkpoint")

        torch.multiprocessing.spawn(rank_main, args=(temporary,), nprocs=2)
        print("FSDP2 loads our checkpoint")
        for ranks in (1, 3):
            ours(ranks, "Torch.Read")
        print("we load the checkpoints of FSDP2")


if __name__ == "__main__":
    main()
