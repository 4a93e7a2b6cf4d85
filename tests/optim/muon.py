#!/usr/bin/env python3
"""muon.py FSDP PROGRAM: our Muon beside torch.optim.Muon, in float32.

PROGRAM (muon_test.cpp) trains the twin of Twin on three ranks, and goes on from its checkpoint on two.
The same steps with torch.optim.Muon and AdamW in one process must give the same parameters and states to
1e-5. PyTorch then goes on from our checkpoint, and PROGRAM from PyTorch's. Exits with 77 if torch, or its
Muon, is missing.
"""
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ["CUDA_VISIBLE_DEVICES"] = ""

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    torch.optim.Muon
except (ImportError, AttributeError) as problem:
    print(f"skipped: {problem}")
    sys.exit(77)

BEFORE, AFTER = 12, 20


class Twin(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, rows, cols in (("square", 24, 24), ("wide", 16, 40), ("tall", 48, 12)):
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(rows, cols)))
        self.bias = torch.nn.Parameter(torch.zeros(10))
        self.lm_head = torch.nn.Linear(8, 6, bias=False)

    def forward(self, step):
        return sum(((p - 0.1 * step) ** 2 * p).sum() for p in self.parameters())


def make():
    model = Twin()
    muon = torch.optim.Muon([model.square, model.wide, model.tall], lr=0.01, weight_decay=0.1,
                            adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([model.bias, model.lm_head.weight], lr=0.02, betas=(0.9, 0.95), eps=1e-6,
                              weight_decay=0.2)
    return model, (muon, adamw)


def train(model, optimizers, first, last):
    rounded = torch.Tensor.bfloat16  # Muon's Newton-Schulz would round to bfloat16
    torch.Tensor.bfloat16 = lambda self: self.float().clone()
    for step in range(first, last):
        model(step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.Tensor.bfloat16 = rounded


def expect_same(model, optimizers, whole):
    found = {"model." + name: value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            for state, value in optimizer.state.get(parameter, {}).items():
                if state != "step":
                    found[f"state.{name}.{state}"] = value
    whole = {name: value for name, value in whole.items() if not name.startswith("steps.")}
    assert found.keys() == whole.keys(), found.keys() ^ whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}")


def states(model, optimizers):
    model_state, optimizer_state = get_state_dict(model, list(optimizers))
    return {"model": model_state, "optim": optimizer_state}


def main():
    fsdp, program = sys.argv[1:3]
    with tempfile.TemporaryDirectory(prefix="fsdp-muon-") as temporary:
        folder = pathlib.Path(temporary)

        def ours(ranks, test):
            subprocess.run([fsdp, "run", "-n", str(ranks), "--", program, "--gtest_brief=1",
                            "--gtest_filter=MuonTwin." + test], check=True,
                           env={**os.environ, "FSDP_TEST_FOLDER": temporary})

        def read(name):
            return torch.load(folder / name, weights_only=False)

        ours(3, "Begins")
        ours(2, "Resumes")
        model, optimizers = make()
        model.load_state_dict({name.removeprefix("model."): value for name, value in read("start").items()})
        train(model, optimizers, 0, BEFORE)
        expect_same(model, optimizers, read("begun.whole"))
        dcp.save(states(model, optimizers), checkpoint_id=folder / "torch", no_dist=True)
        train(model, optimizers, BEFORE, AFTER)
        expect_same(model, optimizers, read("ended.whole"))
        print("20 steps are those of torch.optim.Muon, resumed on other ranks")

        ours(2, "ResumesWhatTorchBegan")
        expect_same(model, optimizers, read("after_torch.whole"))
        print("we go on from PyTorch's checkpoint")

        other, others = make()
        for parameter in other.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for optimizer in others:
            optimizer.step()
            optimizer.zero_grad()
        state = states(other, others)
        dcp.load(state, checkpoint_id=folder / "begun", no_dist=True)
        set_state_dict(other, list(others), model_state_dict=state["model"],
                       optim_state_dict=state["optim"])
        for optimizer in others:
            for key, value in (("lr", 0.01), ("momentum", 0.95)) if optimizer is others[0] else (("lr", 0.02),):
                assert optimizer.param_groups[0][key] == value, optimizer.param_groups
        train(other, others, BEFORE, AFTER)
        expect_same(other, others, read("ended.whole"))
        print("PyTorch goes on from our checkpoint")


if __name__ == "__main__":
    main()
