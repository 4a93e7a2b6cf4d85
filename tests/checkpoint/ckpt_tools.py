#!/usr/bin/env python3
"""ckpt_tools.py FSDP [HF_LOGITS]: fsdp ckpt export, import and consolidate against real PyTorch.

Small models are trained on two ranks and exported. transformers loads them with exactly the weights
of the checkpoint (or rounded to bfloat16) and generates the same text as `fsdp generate`. Models of
transformers are imported and exported unchanged. A consolidated file holds what PyTorch's own
converter makes of the checkpoint. With HF_LOGITS (hf_logits.cpp) logits are compared as well.
Exits with 77 if torch, transformers, tokenizers or safetensors are missing.
"""
import json
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["FSDP_BACKEND"] = "shm"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

try:
    import safetensors
    import safetensors.torch
    import tokenizers
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers
except ImportError as problem:
    print(f"skipped: {problem}")
    sys.exit(77)

warnings.filterwarnings("ignore", "torch.distributed is disabled")
transformers.utils.logging.disable_progress_bar()

FSDP = sys.argv[1]
LOGITS = sys.argv[2] if len(sys.argv) > 2 else None
PROMPT = "shard the "
END = "<|end|>"

TINY = {"data.seq": 32, "model.dim": 32, "model.layers": 2, "model.heads": 4, "model.ffn": 48,
        "train.batch": 8, "optim.lr": 1e-2, "optim.warmup_steps": 1, "train.sample_tokens": 0,
        "train.eval_batches": 1, "steps": 12, "model.init_std": 0.3}
VALID = TINY["train.batch"] * TINY["data.seq"] + 1  # bytes of one batch and its last target
LLAMA3 = {"model.rope_scaling": "llama3", "model.rope_factor": 4, "model.rope_original_tokens": 16,
          "model.rope_base": 5000}
RUNS = {
    "llama": {"model.type": "llama", "model.kv_heads": 2, **LLAMA3},
    "tied": {"model.type": "llama", "model.kv_heads": 1, "model.tied": "true"},
    "qwen2": {"model.type": "qwen2", "model.kv_heads": 2, "model.norm_eps": 1e-6},
    "gpt2": {"model.type": "gpt2", "model.max_tokens": 80},
}


def fsdp(*words, code=0):
    """Runs the binary; returns its stdout and stderr."""
    done = subprocess.run([FSDP, *map(str, words)], capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == code, f"{words}: exit {done.returncode}\n{said}"
    return said


def write_text(file):
    words = "shard gather unit rank reduce step mesh the of".split()
    order = random.Random(1)
    lines = (" ".join(order.choices(words, k=7)) for _ in range(1500))
    file.write_text(".\n".join(lines) + ".\n")


def train(folder, name, tokenizer=None):
    (folder / "valid").write_text((folder / "text").read_text()[-VALID:])
    options = {**TINY, **RUNS[name], "data.train": folder / "text", "data.valid": folder / "valid",
               "dir": folder / name}
    if tokenizer:
        options["data.tokenizer"] = tokenizer
    flags = [word for key, value in options.items() for word in (f"--{key}", value)]
    fsdp("train", "--ranks", 2, *flags)
    return folder / name


def make_tokenizer(folder):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=[END],
                                             initial_alphabet=sorted(alphabet))
    made.train([str(folder / "text")], trainer)
    (folder / "words").mkdir()
    made.save(str(folder / "words" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "words" / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "words" / "tokenizer.json"


def everything(checkpoint):
    """What torch.distributed.checkpoint's own converter reads."""
    state = {}
    dcp.state_dict_loader._load_state_dict(
        state, storage_reader=dcp.FileSystemReader(checkpoint),
        planner=dcp.default_planner._EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def expect_same(found, expected, where=""):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), (where, found.keys() ^ expected.keys())
        for key in expected:
            expect_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected) and len(found) == len(expected), (where, found)
        for i, value in enumerate(expected):
            expect_same(found[i], value, f"{where}.{i}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, (where, found.dtype, expected.dtype)
        assert torch.equal(found, expected), where
    else:
        assert type(found) is type(expected) and found == expected, (where, found, expected)


def rounded(state, dtype):
    return {name: value.to(dtype) for name, value in state.items()}


def names_in(directory):
    """The names of all tensors in a directory's safetensors files; checks each file's metadata."""
    names = []
    for file in sorted(directory.glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}, opened.metadata()
            names += opened.keys()
    assert len(names) == len(set(names)), names
    return set(names)


def load(directory, dtype):
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, output_loading_info=True)
    assert not any(said.get(key) for key in ("missing_keys", "unexpected_keys",
                                             "mismatched_keys")), said
    return model.eval()


def logits_of_ours(folder, directory, ids):
    ids.numpy().tofile(folder / "ids")
    subprocess.run([LOGITS, directory, folder / "ids", folder / "logits"], check=True)
    return torch.from_file(str(folder / "logits"), size=(folder / "logits").stat().st_size // 4,
                           dtype=torch.float32).view(len(ids), -1)


def check_logits(folder, directory, model):
    """Compares transformers' logits of a directory with ours."""
    if not LOGITS:
        return
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (20,))
    with torch.no_grad():
        theirs = model(ids[None]).logits[0].float()
    ours = logits_of_ours(folder, directory, ids)
    difference = (theirs - ours).abs().max() / theirs.abs().max()
    assert difference < 1e-4, f"{directory}: logits differ by {difference} of the largest"


def greedy(model, ids, count):
    with torch.no_grad():
        for _ in range(count):
            last = model(torch.tensor([ids])).logits[0, -1]
            ids = ids + [int(last.argmax())]
    return ids


def check_export(folder, name, run):
    weights = everything(run / "checkpoints" / "latest")["model"]
    tied = name in ("tied", "gpt2")
    stored = weights.keys() - ({"lm_head.weight"} if tied else set())
    for dtype, flags in (("float32", ["--dtype", "fp32", "--max-shard-size", "20KB"]),
                         ("bfloat16", [])):
        out = folder / f"{name}-{dtype}"
        fsdp("ckpt", "export", run, out, *flags)
        assert names_in(out) == stored, names_in(out) ^ stored
        shards = sorted(file.name for file in out.glob("model-*.safetensors"))
        if flags:
            assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
            assert (out / "model.safetensors.index.json").exists()
            index = json.loads((out / "model.safetensors.index.json").read_text())
            assert index["weight_map"].keys() == stored and set(shards) == set(
                index["weight_map"].values())
        else:
            assert shards == [] and (out / "model.safetensors").exists()
        dtype = getattr(torch, dtype)
        model = load(out, dtype)
        expect_same(model.state_dict(), rounded(weights, dtype))
        if tied:
            assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        if flags:
            check_logits(folder, out, model)
            exact = model
    return exact


def check_replacement(folder, run):
    """Files and directories are replaced only with --force."""
    said = fsdp("ckpt", "export", run, folder / "llama-bfloat16", code=1)
    assert "already exists" in said and "--force" in said, said
    fsdp("ckpt", "export", run / "checkpoints", folder / "llama-bfloat16", "--force")
    assert not list(folder.glob("*.partial")) and not list(folder.glob("*.replaced"))
    assert "already exists" in fsdp("ckpt", "consolidate", run, folder / "llama-model.pt", code=1)
    assert "doesn't name a file format" in fsdp("ckpt", "consolidate", run, folder / "model.txt", code=2)
    start, out = folder / "llama-hf", folder / "llama-imported"
    weights = rounded(load(start, torch.float32).state_dict(), torch.bfloat16)
    assert "already exists" in fsdp("ckpt", "import", start, out, code=1)
    fsdp("ckpt", "import", start, out, "--force", "--dtype", "bf16")
    expect_same(everything(out)["model"], weights)
    assert not (folder / "latest").is_symlink()
    print("replaced only with --force")


def check_killed(folder, run):
    """An export that is killed, or started twice, never spoils what has its name."""
    out, draft = folder / "killed", folder / "killed.partial"
    command = ["ckpt", "export", run, out, "--max-shard-size", "1KB"]
    for _ in range(100):  # until it is stopped in the middle
        first = subprocess.Popen([FSDP, *map(str, command)], stdout=subprocess.DEVNULL)
        while first.poll() is None and not draft.exists():
            pass
        first.send_signal(signal.SIGSTOP)
        if draft.exists() and not out.exists():
            break
        first.kill()
        first.wait()
        shutil.rmtree(out)
    written = sorted(draft.iterdir())
    said = fsdp(*command, code=1)
    assert f"{draft}: is being written by process {first.pid} on " in said, said
    assert sorted(draft.iterdir()) == written and not out.exists()
    first.kill()
    first.wait()
    fsdp(*command)
    expect_same(load(out, torch.bfloat16).state_dict(),
                rounded(everything(run / "checkpoints" / "latest")["model"], torch.bfloat16))
    assert not list(folder.glob("killed.partial*"))
    print("a killed export is replaced, and a second one refused")


def check_text(folder, run, model):
    """The model has the same loss and generates the same text here and in transformers."""
    ids = torch.tensor(list((folder / "valid").read_bytes()))
    inputs, targets = (part.view(TINY["train.batch"], -1) for part in (ids[:-1], ids[1:]))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(inputs).logits.transpose(1, 2), targets)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert abs(last["eval_loss"] - loss) < 2e-5, (last, loss)
    ours = fsdp("generate", run, "--prompt", PROMPT, "--tokens", 30, "--temperature", 0, "--quiet")
    theirs = bytes(greedy(model, list(PROMPT.encode()), 30)).decode()
    assert ours == theirs + "\n", (ours, theirs)


def check_tokenizer(folder):
    run = train(folder, "tied", tokenizer=make_tokenizer(folder))
    fsdp("ckpt", "export", run, folder / "words-out", "--dtype", "fp32")
    exported = transformers.AutoTokenizer.from_pretrained(folder / "words-out")
    plain = tokenizers.Tokenizer.from_file(str(folder / "words" / "tokenizer.json"))
    text = "gather the mesh, <|end|>ünd so weiter"
    assert exported(text)["input_ids"] == plain.encode(text).ids
    end = plain.token_to_id(END)
    generation = json.loads((folder / "words-out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == end and exported.eos_token_id == end
    model = load(folder / "words-out", torch.float32)
    assert model.config.eos_token_id == end and model.generation_config.eos_token_id == end
    # An import of an export generates the same text as the run: it has the model and tokenizer.
    fsdp("ckpt", "import", folder / "words-out", folder / "words-in")
    written = {fsdp("generate", where, "--prompt", PROMPT, "--tokens", 20, "--temperature", 0,
                    "--quiet") for where in (run, folder / "words-in", folder / "words-out")}
    assert len(written) == 1, written
    print("export: includes the tokenizer")


def check_origin(folder):
    """The settings in a model's directory survive training and import."""
    said = {"eos_token_id": [7, 9], "temperature": 0.5, "do_sample": True}
    model = next(model for name, model in theirs() if "llama" in name)
    model.save_pretrained(folder / "origin")
    (folder / "origin" / "generation_config.json").write_text(json.dumps(said))
    (folder / "origin" / "chat_template.jinja").write_text("{{ messages }}")
    positions = model.config.max_position_embeddings
    run = folder / "tuned"
    fsdp("train", "--init-from", folder / "origin", "--data.train", "random", "--data.seq", 8,
         "--train.batch", 2, "--steps", 1, "--train.sample_tokens", 0, "--dir", run, "--ranks", 1)
    fsdp("ckpt", "import", folder / "origin", folder / "origin-in")
    for where in (run, folder / "origin-in"):
        out = folder / ("said-" + where.name)
        fsdp("ckpt", "export", where, out)
        assert json.loads((out / "generation_config.json").read_text()) == said
        config = json.loads((out / "config.json").read_text())
        assert config["max_position_embeddings"] == positions, config
    print("export: keeps the settings of the original model")


def check_consolidate(folder, name, run):
    state = everything(run / "checkpoints" / "latest")
    weights = state["model"]
    tied = name in ("tied", "gpt2")
    embedding = "transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight"

    file = folder / f"{name}.pt"
    fsdp("ckpt", "consolidate", run, file)
    found = torch.load(file, weights_only=True)
    expect_same(found, state)
    assert found["extra"]["step"] == TINY["steps"] and found["optim"]["param_groups"][0]["params"]
    if tied:
        assert found["model"]["lm_head.weight"].data_ptr() == found["model"][embedding].data_ptr()
    size = sum(value.nbytes for value in weights.values()) * 3
    assert file.stat().st_size < size + 200_000, file.stat().st_size

    bare = folder / f"{name}-model.pt"
    fsdp("ckpt", "consolidate", run, bare, "--model-only", "--dtype", "bf16")
    expect_same(torch.load(bare, weights_only=True), rounded(weights, torch.bfloat16))
    fsdp("ckpt", "consolidate", run, bare, "--force", "--model-only")
    model = load(folder / f"{name}-float32", torch.float32)
    model.load_state_dict(torch.load(bare, weights_only=True, mmap=True), strict=True)

    single = folder / f"{name}.safetensors"
    fsdp("ckpt", "consolidate", run / "checkpoints" / "latest", single)
    stored = {key: value for key, value in weights.items() if not tied or key != "lm_head.weight"}
    expect_same(safetensors.torch.load_file(single), stored)
    with safetensors.safe_open(single, "pt") as opened:
        note = {"lm_head.weight": embedding} if tied else {}
        assert opened.metadata() == {"format": "pt", **note}, opened.metadata()
    missing, unexpected = safetensors.torch.load_model(model, single)
    assert not missing and not unexpected, (missing, unexpected)


def check_python(folder):
    """A checkpoint written by Python, with dtypes and values that ours never have."""
    torch.manual_seed(5)
    conv = torch.nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(conv.parameters())
    conv(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    model = {**conv.state_dict(), "half": torch.randn(3).half(), "count": torch.tensor(7),
             "flags": torch.tensor([True, False]), "none": torch.empty(0, 4),
             "small": torch.randn(4).to(torch.float8_e4m3fn),
             "words": torch.arange(3).to(torch.uint16)}
    state = {"model": model, "optim": optimizer.state_dict(),
             "extra": {"odd": {1, 2}, "text": "grüße", "pair": (1, 2.5), "nothing": None,
                       "list": [torch.arange(2), {"deep": [1, "x"]}, True]}}
    dcp.save(state, checkpoint_id=folder / "python", no_dist=True)
    expected = everything(folder / "python")
    assert expected["extra"].pop("odd") == {1, 2}
    said = fsdp("ckpt", "consolidate", folder / "python", folder / "python.pt")
    assert '"extra.odd"' in said, said
    found = torch.load(folder / "python.pt", weights_only=True)
    expect_same(found, expected)
    expect_same(found["model"], {key: value.contiguous() for key, value in model.items()})
    # Integers aren't converted.
    fsdp("ckpt", "consolidate", folder / "python", folder / "python.safetensors", "--dtype", "bf16")
    expect_same(safetensors.torch.load_file(folder / "python.safetensors"),
                {key: value.to(torch.bfloat16) if value.is_floating_point() else value
                 for key, value in model.items()})
    assert "doesn't describe its model" in fsdp("ckpt", "export", folder / "python", folder / "x",
                                             code=1)
    print("written by Python: consolidated")


def check_flat(folder):
    """dcp.save(model.state_dict()) of a Llama of transformers: nothing is dropped or renamed."""
    name, model = next((name, model) for name, model in theirs() if "llama" in name.lower())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    assert any(not key.startswith("model.") for key in state), list(state)
    flat = folder / "flat"
    dcp.save(state, checkpoint_id=str(flat), no_dist=True)
    fsdp("ckpt", "consolidate", flat, folder / "flat.safetensors")
    expect_same(safetensors.torch.load_file(str(folder / "flat.safetensors")), state)
    for flags in ((), ("--model-only", "--force")):
        fsdp("ckpt", "consolidate", flat, folder / "flat.pt", *flags)
        expect_same(torch.load(folder / "flat.pt", weights_only=True), state)
    more = folder / "more"
    dcp.save({"model": state, "ema": {"weight": torch.ones(3)}}, checkpoint_id=str(more), no_dist=True)
    said = fsdp("ckpt", "consolidate", more, folder / "more.safetensors")
    assert 'left out 1 tensors' in said and '"ema.weight"' in said, said
    expect_same(safetensors.torch.load_file(str(folder / "more.safetensors")), state)
    print(f"{name} as a flat checkpoint: consolidated")


def theirs():
    """Models of transformers."""
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
                 vocab_size=99, max_position_embeddings=64)
    rope = dict(rope_type="llama3", rope_theta=5000.0, factor=4.0, low_freq_factor=1.0,
                high_freq_factor=4.0, original_max_position_embeddings=16)
    torch.manual_seed(3)
    yield "llama", transformers.LlamaForCausalLM(transformers.LlamaConfig(
        **sizes, num_key_value_heads=2, head_dim=16, rope_parameters=rope, eos_token_id=7))
    yield "tied", transformers.LlamaForCausalLM(transformers.LlamaConfig(
        **sizes, num_key_value_heads=1, tie_word_embeddings=True))
    yield "qwen2", transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        **sizes, num_key_value_heads=2, tie_word_embeddings=True))
    yield "gpt2", transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64, bos_token_id=1,
        eos_token_id=2))


def check_import(folder, name, model):
    """transformers → import → consolidate and DCP; export returns the original."""
    for parameter in model.parameters():  # norms and biases must not stay at 1 and 0
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    start, out, back = (folder / f"{name}-{part}" for part in ("hf", "imported", "back"))
    model.save_pretrained(start, max_shard_size="20KB")
    fsdp("ckpt", "import", start, out)
    weights = {key: value.detach() for key, value in model.state_dict().items()}
    state = everything(out)
    expect_same(state["model"], weights)
    assert state["extra"]["step"] == 0, state["extra"]
    fsdp("ckpt", "consolidate", out, folder / f"{name}-imported.pt")
    expect_same(torch.load(folder / f"{name}-imported.pt", weights_only=True), state)
    into = {"model": {key: torch.zeros_like(value) for key, value in weights.items()}}
    dcp.load(into, checkpoint_id=out)
    expect_same(into["model"], weights)

    fsdp("ckpt", "export", out, back, "--dtype", "fp32")
    again = load(back, torch.float32)
    expect_same(again.state_dict(), weights)
    ids = torch.arange(40)[None] * 7 % 99
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model.eval()(ids).logits)
    before, after = model.config.to_dict(), again.config.to_dict()
    for key in ("max_position_embeddings", "n_positions", "eos_token_id", "bos_token_id",
                "head_dim", "rope_parameters", "rms_norm_eps", "tie_word_embeddings"):
        if before.get(key) is not None:
            assert before[key] == after.get(key), (key, before[key], after.get(key))
    check_logits(folder, start, model)

    # The same without a checkpoint of ours in between, and rounded.
    fsdp("ckpt", "export", start, folder / f"{name}-rounded")
    rounded_model = load(folder / f"{name}-rounded", torch.bfloat16)
    expect_same(rounded_model.state_dict(), rounded(weights, torch.bfloat16))
    fsdp("ckpt", "import", folder / f"{name}-rounded", folder / f"{name}-half")
    expect_same(everything(folder / f"{name}-half")["model"], rounded(weights, torch.bfloat16))


def check_damage(folder):
    """Errors name what is wrong with a source, and a failed attempt leaves nothing behind."""
    start, out = folder / "llama-hf", folder / "damaged-out"
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    for command in ("import", "export"):
        said = fsdp("ckpt", command, start, out, code=1)
        assert "model.layers.0.mlp.gate_proj.weight" in said and "[40, 32]" in said, said
    (start / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert "model.layers.2" in fsdp("ckpt", "import", start, out, code=1)
    (start / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    assert "model.layers.1" in fsdp("ckpt", "import", start, out, code=1)

    run = folder / "llama"
    checkpoint = (run / "checkpoints" / "latest").resolve()
    with open(checkpoint / ".metadata", "rb") as opened:
        places = pickle.load(opened).storage_data
    place = next(place for index, place in places.items() if place.relative_path == "__1_0.distcp"
                 and index.fqn.startswith("model."))
    file = checkpoint / place.relative_path
    damaged = bytearray(file.read_bytes())
    damaged[place.offset + place.length // 2] ^= 1
    file.write_bytes(damaged)
    for words in (("export", run, out), ("consolidate", run, folder / "damaged.pt"),
                  ("consolidate", run, folder / "damaged.safetensors")):
        said = fsdp("ckpt", *words, code=65)
        assert "__1_0.distcp" in said and re.search(r'"(model|optim|extra)\.', said), said
    left = [file.name for file in folder.iterdir() if file.name.startswith("damaged")]
    assert left == [], left


def main():
    with tempfile.TemporaryDirectory(prefix="fsdp-ckpt-") as temporary:
        folder = pathlib.Path(temporary)
        write_text(folder / "text")
        for name in RUNS:
            run = train(folder, name)
            model = check_export(folder, name, run)
            check_text(folder, run, model)
            check_consolidate(folder, name, run)
            print(f"{name}: exported and consolidated", flush=True)
        for name, model in theirs():
            check_import(folder, name, model)
            print(f"{name}: imported", flush=True)
        check_replacement(folder, folder / "llama")
        check_killed(folder, folder / "llama")
        check_python(folder)
        check_flat(folder)
        check_damage(folder)
        (folder / "again").mkdir()
        write_text(folder / "again" / "text")
        check_tokenizer(folder / "again")
        check_origin(folder / "again")


if __name__ == "__main__":
    main()
