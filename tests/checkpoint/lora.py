#!/usr/bin/env python3
"""lora.py FSDP: adapters of every family of decoders, against LoRA by hand in PyTorch.

transformers writes a small model with random weights, and this program random adapters as PEFT
stores them. `fsdp train` with both must have the losses of the same training in plain PyTorch, on 1
to 3 ranks, and in a run that was stopped and resumed. Its checkpoints must hold adapters alone. `fsdp
ckpt export` writes them for PEFT, with the values that PyTorch has, and merged into the base, with
the logits of PyTorch's model; if Python has PEFT, that loads them, too. One model has a base in NF4,
which PyTorch has as the numbers that NF4's definition gives. Exits with 77 if a package is missing.
"""
import json
import math
import os
import pathlib
import sys
import tempfile

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"

try:
    import safetensors.torch
    import torch
    import transformers
    from torch.distributed.checkpoint import FileSystemReader
except ImportError as problem:
    print(f"skipped: {problem}")
    sys.exit(77)

import families
from families import BATCH, SEQ, run
from transformers.pytorch_utils import Conv1D

FAMILIES = {"llama": ("Llama", 2, {}), "qwen2": ("Qwen2", 3, {}), **families.FAMILIES,
            "nf4": ("Qwen2", 3, dict(hidden_size=128, intermediate_size=192)), "gpt2": ("GPT2", 2, {})}
del FAMILIES["gemma3-images"]  # adapters are for its text model, whose names are without images
LONG, STEPS = 20, 2  # steps of the first family and of the others
RATE, DECAY, RANK, ALPHA = 0.01, 0.1, 3, 7
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {"gpt2": ["c_attn", "attn.c_proj", "c_fc"],
           "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
           "qwen2": ["q_proj", "v_proj", "down_proj"], "olmo2": ["self_attn.k_proj", "up_proj"],
           "dots1": ["q_proj", "k_proj", "v_proj", "o_proj"]}  # PEFT takes gate_proj for experts, too
PREFIX = "base_model.model."
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0])


class Adapted(torch.nn.Module):
    def __init__(self, base, scale):
        super().__init__()
        self.base, self.scale = base, scale
        rows, columns = base.weight.shape
        if isinstance(base, Conv1D):
            rows, columns = columns, rows
        self.a = torch.nn.Parameter(torch.randn(RANK, columns) / math.sqrt(columns))
        self.b = torch.nn.Parameter(torch.randn(rows, RANK) * 0.1)

    def forward(self, x):
        return self.base(x) + self.scale * ((x @ self.a.T) @ self.b.T)


def make(name):
    if name != "gpt2":
        return families.make(name)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=families.VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=None, eos_token_id=None))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15) if parameter.dim() > 1 else parameter.uniform_(-0.5, 1.5)
    return model.eval()


def quantise(model):
    """Gives the linears of the blocks the numbers that NF4 keeps of them."""
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            blocks = module.weight.data.view(-1, 64)
            largest = blocks.abs().amax(1, keepdim=True)
            scaled, middles = blocks * (1 / largest), (NF4[1:] + NF4[:-1]) / 2  # rounded as ours are
            nearest = (scaled.unsqueeze(-1) > middles).sum(-1)
            module.weight.data = (NF4[nearest] * largest).view_as(module.weight)


def adapt(model, targets, scale):
    """Replaces linears; returns what they became, by name."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adapted = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, (torch.nn.Linear, Conv1D)) and any(("." + name).endswith("." + t) for t in targets):
            parent, own = name.rsplit(".", 1)
            adapted[name] = Adapted(module, scale)
            setattr(model.get_submodule(parent), own, adapted[name])
    return adapted


def tensors_of(adapted):
    named = {}
    for name, one in adapted.items():
        named[f"{PREFIX}{name}.lora_A.weight"] = one.a.detach().clone()
        named[f"{PREFIX}{name}.lora_B.weight"] = one.b.detach().clone()
    return named


def write_peft(folder, adapted, targets, rslora, base):
    folder.mkdir()
    safetensors.torch.save_file(tensors_of(adapted), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(dict(
        peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=str(base), r=RANK,
        lora_alpha=ALPHA, lora_dropout=0.0, use_rslora=rslora, target_modules=targets, bias="none",
        peft_version="0.17.0", modules_to_save=None, use_dora=False, rank_pattern={})))


def train_by_hand(model, adapted, text, steps):
    parameters = [p for one in adapted.values() for p in (one.a, one.b)]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)
    ids, losses = torch.tensor(list(text.encode())), []
    for step in range(steps):
        first = step * BATCH
        rows = torch.stack([ids[SEQ * i: SEQ * i + SEQ + 1] for i in range(first, first + BATCH)])
        logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(fsdp, folder, name, ranks, steps, extra=()):
    """Trains the adapters in NAME-start; returns the run's directory and its losses."""
    if name == "nf4":
        extra = ("--lora.base", "nf4", *extra)
    if name in ("mixtral", "qwen3_moe", "dots1"):
        extra = ("--model.balance", 0, *extra)
    out = folder / f"{name}-{ranks}{''.join(str(word).strip('-') for word in extra)}"
    command = [fsdp, "train", "--ranks", ranks, "--init-from", folder / name, "--lora.init_from",
               folder / (name + "-start"), "--dir", out, "--data.train", folder / "text",
               "--data.tokenizer", "bytes", "--data.seq", SEQ, "--data.shuffle=false",
               "--data.valid_share", 0, "--train.batch", BATCH, "--train.sample_tokens", 0,
               "--shard.precision", "fp32", "--optim.lr", RATE, "--optim.weight_decay", DECAY,
               "--optim.schedule", "constant", "--optim.warmup_steps", 0, "--log.every", 1, *extra]
    if ranks == 2:  # stopped halfway
        run(*command, "--steps", steps // 2)
        run(*command, "--steps", steps, "--resume")
    else:
        run(*command, "--steps", steps)
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return out, [line["loss"] for line in lines if "loss" in line]


def check_losses(name, ranks, ours, theirs):
    if len(ours) != len(theirs):
        sys.exit(f"{name}: {len(ours)} losses of {len(theirs)} steps")
    worst = max(abs(a - b) for a, b in zip(ours, theirs))
    print(f"{name}, ranks {ranks}: losses {ours[0]:.6f} to {ours[-1]:.6f}, differ by {worst:.1e}")
    if not worst < 1e-4:
        sys.exit(f"{name}: losses differ: {ours} and {theirs}")


def check_checkpoint(name, out):
    listed = FileSystemReader(out / "checkpoints" / "latest").read_metadata().state_dict_metadata
    tensors = [key for key in listed if key.startswith(("model.", "optim.state."))]
    if not tensors or not all(".lora_A." in key or ".lora_B." in key for key in tensors):
        sys.exit(f"{name}: the checkpoint has more than adapters: {tensors}")


def near(ours, theirs, most):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item() < most


def check_exports(fsdp, folder, name, out, model, adapted, targets, rslora):
    peft, merged = folder / (name + "-peft"), folder / (name + "-merged")
    run(fsdp, "ckpt", "export", out, peft)
    run(fsdp, "ckpt", "export", out, merged, "--merge", "--dtype", "fp32")
    config = json.loads((peft / "adapter_config.json").read_text())
    wanted = dict(peft_type="LORA", task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, bias="none",
                  use_rslora=rslora, fan_in_fan_out=name == "gpt2", target_modules=sorted(targets))
    different = {key: config.get(key) for key, value in wanted.items() if config.get(key) != value}
    if different or not os.path.samefile(config["base_model_name_or_path"], folder / name):
        sys.exit(f"{name}: adapter_config.json has {different or config}")
    written, theirs = safetensors.torch.load_file(peft / "adapter_model.safetensors"), tensors_of(adapted)
    if {n: t.shape for n, t in written.items()} != {n: t.shape for n, t in theirs.items()}:
        sys.exit(f"{name}: the names or shapes of adapters differ: {sorted(written)}")
    for key, tensor in theirs.items():
        if not near(written[key], tensor, 1e-3):
            sys.exit(f"{name}: {key} differs")
    # What was written, by hand in the model, must be what was merged.
    for key, one in adapted.items():
        one.a.data = written[f"{PREFIX}{key}.lora_A.weight"]
        one.b.data = written[f"{PREFIX}{key}.lora_B.weight"]
    whole, said = transformers.AutoModelForCausalLM.from_pretrained(
        merged, dtype=torch.float32, output_loading_info=True)
    if said["missing_keys"] or said["unexpected_keys"]:
        sys.exit(f"{name}: transformers misses or doesn't know tensors: {said}")
    ids = torch.randint(0, families.VOCAB, (2, 40))
    with torch.no_grad():
        by_hand, ours = model(ids).logits, whole.eval()(ids).logits
    if not near(ours, by_hand, 2e-5):
        sys.exit(f"{name}: the logits of the merged model differ")
    families.check_text(fsdp, name, out, whole)
    if name == "nf4":  # others load the adapters beside the base as it was
        return "with a base in NF4"
    said = [run(fsdp, "generate", where, "--prompt", "a", "--temperature", 0, "--tokens", 9,
                "--quiet", *flags) for where, flags in ((out, ()), (peft, ("--tokenizer", "bytes")))]
    if said[0] != said[1]:
        sys.exit(f"{name}: generate wrote {said[0]!r} with the run, {said[1]!r} with PEFT's directory")
    try:
        import peft as library
    except ImportError:
        return "without PEFT"
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    with torch.no_grad():
        loaded = library.PeftModel.from_pretrained(base, peft).eval()(ids).logits
    if not near(loaded, by_hand, 2e-5):
        sys.exit(f"{name}: PEFT's logits differ")
    return "with PEFT"


def check(fsdp, folder, name, text, long):
    targets, rslora = TARGETS.get(name, ALL), name in ("qwen3", "gemma3")
    model = make(name)
    model.save_pretrained(folder / name)
    (folder / name / "tokenizer.json").unlink(missing_ok=True)
    if name == "nf4":
        quantise(model)
    adapted = adapt(model, targets, ALPHA / (math.sqrt(RANK) if rslora else RANK))
    write_peft(folder / (name + "-start"), adapted, targets, rslora, folder / name)
    steps = LONG if long else STEPS
    theirs = train_by_hand(model, adapted, text, steps)
    for ranks in (1, 2, 3) if long or name == "nf4" else (FAMILIES[name][1],):
        out, ours = train(fsdp, folder, name, ranks, steps)
        check_losses(name, ranks, ours, theirs)
        check_checkpoint(name, out)
    if long:  # recomputation needs no gradient of the input of the first block
        _, ours = train(fsdp, folder, name, 3, steps, ("--activations.mode", "full"))
        check_losses(name, "3, recomputed", ours, theirs)
    with_peft = check_exports(fsdp, folder, name, out, model, adapted, targets, rslora)
    print(f"{name}: exported and merged, {with_peft}")


def main():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    families.FAMILIES = FAMILIES
    chosen = sys.argv[3:] or list(FAMILIES)
    text = "each rank gathers the shard of a unit, and reduces its gradient.\n" * 60
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        (folder / "text").write_text(text)
        for name in chosen:
            check(sys.argv[1], folder, name, text, long=name == chosen[0])


if __name__ == "__main__":
    main()
