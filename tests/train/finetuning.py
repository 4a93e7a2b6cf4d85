#!/usr/bin/env python3
"""finetuning.py FSDP ROOT [WHAT...]: fine-tuning from models, checkpoints and names of others.

Makes a tiny random model of transformers, a tokenizer with a chat template and a file of chats. Then

  page    the commands of ROOT/docs/finetuning.md run as they stand there
  chat    `fsdp generate --chat` and --prompts write what transformers does for the same template
  names   a model is found by its name in Hugging Face's cache, or the error says how to get it
  dcp     checkpoints of torch.distributed.checkpoint start runs, with the optimizer's states
  losses  20 steps of full fine-tuning and of LoRA have the losses of transformers and PEFT

Exits with 77 if a package is missing.
"""
import json
import os
import pathlib
import pty
import re
import shutil
import subprocess
import sys
import tempfile

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"

try:
    import tokenizers
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
except ImportError as problem:
    print(f"skipped: {problem}")
    sys.exit(77)
try:
    import peft
except ImportError:  # lora.py has the same by hand
    peft = None

TEMPLATE = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
QUESTIONS = ["What is a shard?", "And a unit?", "Who gathers it, and when?"]
ANSWERS = ["A rank's part of a unit.", "What is gathered together.", "Each rank, before it is used."]


def run(*command, code=0, stdin=None, cwd=None, **environment):
    environment = dict(os.environ, OMP_NUM_THREADS="1", FSDP_BACKEND="shm", **environment)
    done = subprocess.run([str(word) for word in command], capture_output=True, env=environment,
                          cwd=cwd, input=(stdin or "").encode())
    said, errors = (out.decode(errors="replace") for out in (done.stdout, done.stderr))
    if done.returncode != code:
        sys.exit(f"{command} returned {done.returncode}\n{said}\n{errors}")
    return said if code == 0 else errors


def typed(text, *command):
    """What a terminal shows, and stderr."""
    terminal, program = pty.openpty()
    with subprocess.Popen([str(word) for word in command], stdin=program, stdout=program,
                          stderr=subprocess.PIPE, env=dict(os.environ, TERM="dumb")) as done:
        os.close(program)
        os.write(terminal, text.encode())
        shown = b""
        try:
            while more := os.read(terminal, 65536):
                shown += more
        except OSError:  # the program has closed it
            pass
        errors = done.stderr.read().decode()
    os.close(terminal)
    if done.returncode != 0:
        sys.exit(f"{command} returned {done.returncode}\n{errors}")
    return shown.decode().replace("\r\n", "\n"), errors


def expect(fact, what):
    if not fact:
        sys.exit(what)


def make_model(folder):
    """A tiny Qwen2 with a byte-level tokenizer of its own."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.train_from_iterator(QUESTIONS + ANSWERS, tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(5)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        vocab_size=304, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, max_position_embeddings=256,
        tie_word_embeddings=True, eos_token_id=0, bos_token_id=None, pad_token_id=None))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.25) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for step in range(60):  # so that turns end, often
        turns = [{"role": "user", "content": QUESTIONS[step % 3]},
                 {"role": "assistant", "content": ANSWERS[step % 3]}]
        ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=False)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer


def write_chats(file):
    chats = [{"messages": [{"role": "user", "content": question},
                           {"role": "assistant", "content": f"{answer} {number}"}]}
             for number in range(20) for question, answer in zip(QUESTIONS, ANSWERS)]
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


# --- the page ---

def page(fsdp, root, folder, model, tokenizer):
    text = (root / "docs/finetuning.md").read_text()
    commands = re.search(r"## Five commands.*?```sh\n(.*?)```", text, re.S)[1].splitlines()
    expect(len(commands) == 5, f"docs/finetuning.md has {len(commands)} commands instead of five")
    (folder / "models").mkdir()
    shutil.copytree(folder / "model", folder / "models/Qwen3-0.6B")
    (folder / "bin").mkdir()
    (folder / "bin/fsdp").symlink_to(fsdp)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    said = [run("sh", "-c", command, cwd=folder, stdin="What is a shard?\nAnd a unit?\n", PATH=path)
            for command in commands]
    expect("[[A rank's part of a unit. 0<|im_end|>]]" in said[0], f"--show: {said[0]}")
    recipe = ["recipe     learning rate 2e-4 (for adapters), warm-up over 3 % of the steps, 3 epochs",
              "16 samples per step, 128 tokens per sample (the longest line has", "the model takes 256)"]
    expect(all(line in said[1] for line in recipe), f"no recipe in {said[1]}")
    expect("generate runs/tuned --chat" in said[1], f"no way on in {said[1]}")
    expect("adapter" in said[1] and "#include" not in said[1], f"not a fine-tuning: {said[1]}")
    expect(said[2].strip() and said[4].count("\n") >= 2, f"no answers: {said[2]!r} {said[4]!r}")
    config = (folder / "runs/tuned/config.toml").read_text()
    for line in ("lr = 2e-4", "warmup_share = 0.03", "seq = 128", "epochs = 3", "sample_tokens = 0",
                 "loss_mask = true"):
        expect(f"\n{line}" in config, f"config.toml has no {line}")
    # What the user sets wins, and the rest is the recipe's.
    (folder / "mine.toml").write_text("[train]\nsteps = 2\n[optim]\nwarmup_steps = 1\n")
    mine = run(fsdp, "train", folder / "mine.toml", "--init-from", folder / "model", "--data.train",
               folder / "chats.jsonl", "--batch", 4, "--print-config")
    for line in ("steps = 2", "epochs = 0", "batch = 4", "micro_batch = 1", "lr = 2e-5",
                 "warmup_steps = 1", "warmup_share = 0", "weight_decay = 0"):
        expect(f"\n{line}" in mine, f"with a config: no {line}\n{mine}")
    plan = run(fsdp, "plan", "finetune", "--init-from", folder / "model", "--data.train",
               folder / "chats.jsonl", "--lora.rank", 16, "--world", 1)
    expect("adapters" in plan, f"fsdp plan finetune: {plan}")
    errors = run(fsdp, "train", "--init-from", folder / "model", code=2)
    expect("nothing to train these weights on" in errors, errors)
    print("page: all five commands work as written")


# --- conversations ---

def answer_of(model, tokenizer, messages, most):
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt",
                                        return_dict=False)
    with torch.no_grad():
        made = model.generate(ids, do_sample=False, max_new_tokens=most, pad_token_id=0,
                              eos_token_id=[0, tokenizer.convert_tokens_to_ids("<|im_end|>")])
    made = made[0, ids.size(1):].tolist()
    ended = made and made[-1] in (0, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    return tokenizer.decode(made, skip_special_tokens=True), len(made) - bool(ended), bool(ended)


def chat(fsdp, root, folder, model, tokenizer):
    greedy = ("--temperature", 0, "--tokens", 24, "--quiet")
    where = folder / "model"
    messages, theirs = [{"role": "system", "content": "Be short."}], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        text, _, _ = answer_of(model, tokenizer, messages, 24)
        messages.append({"role": "assistant", "content": text})
        theirs.append(text)
    ours = run(fsdp, "generate", where, "--chat", "--system", "Be short.", *greedy,
               stdin="\n\n".join(QUESTIONS) + "\n")
    expect(ours == "".join(text + "\n" for text in theirs), f"chat: {ours!r}, transformers {theirs!r}")
    one = run(fsdp, "generate", where, "--chat", "--prompt", QUESTIONS[0], *greedy)
    text, _, _ = answer_of(model, tokenizer, [{"role": "user", "content": QUESTIONS[0]}], 24)
    expect(one == text + "\n", f"--prompt: {one!r}, transformers {text!r}")
    shown, errors = typed(f"{QUESTIONS[0]}\n\n/new\n{QUESTIONS[0]}\n\x04", fsdp, "generate", where,
                          "--chat", "--temperature", 0, "--tokens", 24)
    expect(shown.count(text) == 2 and shown.count("> ") >= 4, f"on a terminal: {shown!r}")
    expect("Ctrl-D ends" in errors and "tokens per second" not in shown, f"on a terminal: {errors!r}")

    # Many at once, of different lengths, in batches that don't divide their number.
    lines = [[{"role": "user", "content": question * (1 + number % 3)}]
             for number, question in enumerate(QUESTIONS * 2 + QUESTIONS[:1])]
    (folder / "questions.jsonl").write_text(
        "".join(json.dumps({"messages": line}) + "\n\n" for line in lines))
    said = run(fsdp, "generate", where, "--prompts", folder / "questions.jsonl", "--batch", 3, *greedy)
    rows = [json.loads(line) for line in said.splitlines()]
    expect(len(rows) == len(lines), f"{len(rows)} answers to {len(lines)} questions")
    ends = set()
    for row, line in zip(rows, lines):
        text, tokens, ended = answer_of(model, tokenizer, line, 24)
        wanted = {"messages": line + [{"role": "assistant", "content": text}], "tokens": tokens,
                  "end": "stop" if ended else "length"}
        ends.add(wanted["end"])
        expect(row == wanted, f"--prompts: {row}, transformers {wanted}")
    print(f"chat: the same as transformers; answers end by {' and '.join(sorted(ends))}")

    # Texts; the same with and without others beside them, also when sampled.
    (folder / "texts.txt").write_text("".join(question + "\n" for question in QUESTIONS))
    sampled = [run(fsdp, "generate", where, "--prompts", folder / "texts.txt", "--batch", batch,
                   "--tokens", 12, "--quiet") for batch in (1, 3)]
    rows = [json.loads(line) for line in sampled[0].splitlines()]
    expect(sampled[0] == sampled[1], f"batches change what is sampled: {sampled}")
    expect([row["prompt"] for row in rows] == QUESTIONS and all("completion" in row for row in rows),
           f"--prompts of texts: {rows}")

    # generation_config.json: what ends a text, and how to sample.
    other = folder / "other"
    shutil.copytree(where, other)
    first = tokenizer.encode(one.strip())[0]
    (other / "generation_config.json").write_text(json.dumps(
        {"eos_token_id": [0, first], "do_sample": True, "top_k": 1, "temperature": 0.7}))
    text = run(fsdp, "generate", other, "--chat", "--prompt", QUESTIONS[0], "--quiet")
    expect(text == "\n", f"an id in generation_config.json ends no text: {text!r}")
    (other / "chat_template.jinja").unlink()
    errors = run(fsdp, "generate", other, "--chat", "--prompt", "a", code=1)
    expect("has no chat template" in errors and "--chat-template" in errors, errors)
    expect("add --chat" in run(fsdp, "generate", where, "--system", "a", code=2), "--system alone")
    (folder / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    errors = run(fsdp, "generate", where, "--prompts", folder / "bad.jsonl", "--tokens", 1, code=1)
    expect("bad.jsonl: line 2: \"prompt\" isn't a string" in errors, errors)


# --- names ---

def names(fsdp, root, folder, model, tokenizer):
    hub = folder / "cache/hub"
    snapshot = hub / "models--Org--Tiny-1.0/snapshots/0123abcd"
    snapshot.parent.mkdir(parents=True)
    (hub / "models--Org--Tiny-1.0/blobs").mkdir()
    snapshot.mkdir()
    for file in (folder / "model").iterdir():  # links, as huggingface_hub makes them
        shutil.copy(file, hub / "models--Org--Tiny-1.0/blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (hub / "models--Org--Tiny-1.0/snapshots/9999").mkdir()
    (hub / "models--Org--Tiny-1.0/refs").mkdir()
    (hub / "models--Org--Tiny-1.0/refs/main").write_text("0123abcd")
    greedy = ("--prompt", "a", "--temperature", 0, "--tokens", 9, "--quiet")
    wanted = run(fsdp, "generate", folder / "model", *greedy)
    for variables in (dict(HF_HUB_CACHE=str(hub)), dict(HF_HOME=str(hub.parent)),
                      dict(HOME=str(folder / "home"), HF_HOME="", XDG_CACHE_HOME="")):
        if "HOME" in variables:
            (folder / "home/.cache").mkdir(parents=True)
            (folder / "home/.cache/huggingface").symlink_to(hub.parent)
        said = run(fsdp, "generate", "Org/Tiny-1.0", *greedy, **variables)
        expect(said == wanted, f"{variables}: {said!r} instead of {wanted!r}")
    cached = dict(HF_HUB_CACHE=str(hub))
    run(fsdp, "tokenize", folder / "chats.jsonl", "--tokenizer", "Org/Tiny-1.0", "--show", 1, **cached)
    run(fsdp, "ckpt", "import", "Org/Tiny-1.0", folder / "imported", **cached)
    run(fsdp, "train", "--ranks", 1, "--init-from", "Org/Tiny-1.0", "--data.train",
        folder / "chats.jsonl", "--lora.rank", 2, "--steps", 1, "--dir", folder / "named", **cached)
    run(fsdp, "ckpt", "export", folder / "named", folder / "named-peft")
    config = json.loads((folder / "named-peft/adapter_config.json").read_text())
    expect(config["base_model_name_or_path"] == "Org/Tiny-1.0", f"adapters name {config}")
    run(fsdp, "generate", folder / "named-peft", *greedy, **cached)
    run(fsdp, "ckpt", "export", folder / "named-peft", folder / "named-merged", "--merge", **cached)
    errors = run(fsdp, "train", "--init-from", "Org/None", "--data.train", "random", code=2, **cached)
    expect(f"no model of that name in Hugging Face's cache, {hub}" in errors and
           "hf download Org/None" in errors, errors)
    (hub / "models--Org--Tiny-1.0/refs/main").write_text("9999")
    errors = run(fsdp, "generate", "Org/Tiny-1.0", code=1, **cached)
    expect("has no complete snapshot of Org/Tiny-1.0" in errors, errors)
    print("names: models are found in the cache")


# --- checkpoints of PyTorch ---

def step_by_hand(model, optimizer, rows):
    logits = model(rows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def losses_of(run_folder):
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


SEQ, BATCH = 24, 4
PLAIN = ["--data.seq", SEQ, "--data.shuffle=false", "--data.valid_share", 0, "--train.batch", BATCH,
         "--train.micro_batch", 0, "--shard.precision", "fp32", "--optim.schedule", "constant",
         "--optim.warmup_steps", 0, "--optim.warmup_share", 0, "--log.every", 1]


def rows_of(tokenizer, folder, step):
    ids = torch.tensor(tokenizer.encode((folder / "text").read_text()))
    first = step * BATCH
    return torch.stack([ids[SEQ * i: SEQ * i + SEQ + 1] for i in range(first, first + BATCH)])


def adamw(parameters, rate, decay=0.0):
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)


def near(ours, theirs, most, what):
    expect(len(ours) == len(theirs), f"{what}: {len(ours)} losses of {len(theirs)} steps")
    worst = max(abs(a - b) for a, b in zip(ours, theirs))
    print(f"{what}: losses {ours[0]:.6f} to {ours[-1]:.6f} differ by {worst:.1e}")
    expect(worst < most, f"{what}: losses differ: {ours} and {theirs}")


def from_pytorch(fsdp, root, folder, model, tokenizer):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    optimizer = adamw(model.parameters(), 0.01)
    for step in range(2):
        step_by_hand(model, optimizer, rows_of(tokenizer, folder, step))
    states = get_optimizer_state_dict(model, optimizer)
    kinds = {"theirs": {"model": model.state_dict(), "optim": states},
             "app": {"app": {"model": model.state_dict(), "optim": states}},
             "optimizer": {"model": model.state_dict(), "optimizer": states},
             "bare": model.state_dict()}
    for name, state in kinds.items():
        # In its directory, or in the one above.
        where = folder / "dcp" / name / "step-2" if name == "app" else folder / "dcp" / name
        dcp.save(state, checkpoint_id=where, no_dist=True)
        model.config.save_pretrained(folder / "dcp" / name)
        tokenizer.save_pretrained(folder / "dcp" / name)
        kinds[name] = where
    with torch.no_grad():
        ids = tokenizer("What", return_tensors="pt").input_ids
        made = model.generate(ids, do_sample=False, max_new_tokens=9, pad_token_id=0)[0].tolist()
    text = tokenizer.decode(made, skip_special_tokens=True)
    theirs = [step_by_hand(model, optimizer, rows_of(tokenizer, folder, step)) for step in range(3)]
    for name, where in kinds.items():
        said = run(fsdp, "generate", where, "--prompt", "What", "--temperature", 0, "--tokens", 9,
                   "--quiet")
        expect(said == text + "\n", f"dcp {name}: generate wrote {said!r}, transformers {text!r}")
        out = folder / f"dcp-{name}-run"
        both = ["--optim-from", where] if name != "bare" else []
        run(fsdp, "train", "--ranks", 2 if name == "app" else 1, "--init-from", where, *both,
            "--data.train", folder / "text", *PLAIN, "--train.clip", 0, "--optim.lr", 0.01, "--steps", 3,
            "--dir", out)
        if both:
            near(losses_of(out), theirs, 1e-4, f"dcp {name}")
        else:  # fresh states: another way after the first step
            near(losses_of(out)[:1], theirs[:1], 1e-4, f"dcp {name}, first step")
            expect(abs(losses_of(out)[2] - theirs[2]) > 1e-3, "states were there without --optim-from")
    run(fsdp, "ckpt", "export", kinds["theirs"], folder / "dcp-exported", "--dtype", "fp32")
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder / "dcp-exported",
                                                                 dtype=torch.float32)
    state = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    expect(exported.state_dict().keys() == state.keys(), "export of a DCP checkpoint: other names")
    expect(exported.config.max_position_embeddings == 256, "export of a DCP checkpoint: positions")
    expect((folder / "dcp-exported/tokenizer.json").exists(), "export of a DCP checkpoint: tokenizer")
    (folder / "dcp/bare/config.json").unlink()
    errors = run(fsdp, "train", "--init-from", kinds["bare"], "--data.train", folder / "text", code=2)
    expect("doesn't describe its model" in errors and "config.json" in errors, errors)
    errors = run(fsdp, "train", "--init-from", folder / "model", "--optim-from", folder / "dcp/bare",
                 "--data.train", folder / "text", "--dir", folder / "none", "--ranks", 1, code=1)
    expect('no tensor named "optim.' in errors, errors)


# --- the same losses as transformers and PEFT ---

def losses(fsdp, root, folder, model, tokenizer):
    steps = 20
    common = ["--data.train", folder / "text", *PLAIN, "--optim.lr", 0.01, "--optim.weight_decay", 0.1,
              "--steps", steps]
    start = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    matrices = [p for p in start.parameters() if p.dim() > 1]
    others = [p for p in start.parameters() if p.dim() == 1]
    optimizer = adamw([{"params": matrices}, {"params": others, "weight_decay": 0.0}], 0.01, 0.1)

    def train(model, parameters):
        made = []
        for step in range(steps):
            rows = rows_of(tokenizer, folder, step)
            optimizer.zero_grad()
            logits = model(input_ids=rows[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            made.append(loss.item())
        return made

    theirs = train(start, list(start.parameters()))
    run(fsdp, "train", "--ranks", 2, "--init-from", folder / "model", "--dir", folder / "full", *common)
    near(losses_of(folder / "full"), theirs, 1e-4, "full fine-tuning")

    expect(theirs[-1] < 0.9 * theirs[0], "nothing was learned")
    if not peft:
        return print("LoRA: without PEFT")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    adapted = peft.get_peft_model(base, peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, task_type="CAUSAL_LM",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]))
    adapted.save_pretrained(folder / "start")
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = adamw(parameters, 0.01, 0.1)
    theirs = train(adapted, parameters)
    run(fsdp, "train", "--ranks", 2, "--init-from", folder / "model", "--lora.init_from",
        folder / "start", "--dir", folder / "lora", *common)
    near(losses_of(folder / "lora"), theirs, 1e-4, "LoRA")


PARTS = {"page": page, "chat": chat, "names": names, "dcp": from_pytorch, "losses": losses}


def main():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    fsdp, root = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        model, tokenizer = make_model(folder / "model")
        write_chats(folder / "chats.jsonl")
        (folder / "text").write_text((" ".join(QUESTIONS + ANSWERS) + "\n") * 60)
        for part in sys.argv[3:] or PARTS:
            PARTS[part](fsdp, root, folder, model, tokenizer)


if __name__ == "__main__":
    main()
