#!/usr/bin/env python3
"""hugging_face.py FSDP HF_LOGITS: reads models of Hugging Face's transformers.

Small models with random weights are written with save_pretrained, in one file and in many.
HF_LOGITS (hf_logits.cpp) loads each and computes logits, which must match those of transformers.
Then `fsdp train --init-from` on two ranks must show the loss that transformers computes for the
same tokens, and `fsdp generate` must generate what transformers does. Exits with 77 if a package is
missing.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"

try:
    import safetensors.torch
    import tokenizers
    import torch
    import transformers
except ImportError as problem:
    print(f"skipped: {problem}")
    sys.exit(77)

TOLERANCE = 1e-4  # of logits, relative to the largest
VOCAB = 320
LLAMA = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
             rms_norm_eps=1e-5)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=24)
GPT2 = dict(vocab_size=VOCAB, n_positions=64, n_embd=48, n_layer=2, n_head=4)


def llama(**changes):
    rope = changes.pop("rope", dict(rope_type="default", rope_theta=10000.0))
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**LLAMA, **changes}, rope_parameters=rope))


def qwen2(**changes):
    rope = dict(rope_type="default", rope_theta=1e6)
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**{**LLAMA, **changes}, rope_parameters=rope))


def gpt2(**changes):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, **changes}))


MODELS = {
    "llama": lambda: llama(),
    "llama_tied": lambda: llama(tie_word_embeddings=True),
    "llama_all_heads": lambda: llama(num_key_value_heads=4, rms_norm_eps=1e-3),
    "llama_head_dim": lambda: llama(head_dim=24),
    "llama3": lambda: llama(rope=LLAMA3),
    "qwen2": lambda: qwen2(),
    "qwen2_tied": lambda: qwen2(tie_word_embeddings=True),
    "gpt2": lambda: gpt2(),
    "gpt2_ffn": lambda: gpt2(n_inner=80, layer_norm_epsilon=1e-3),
}


def randomize(model):
    """Weights large enough for every part to matter; the initial 0, 1 or 0.02 hide mistakes."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            else:
                parameter.uniform_(0.5, 1.5)


def reference(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


class Tests:
    def __init__(self, fsdp, hf_logits, folder):
        self.fsdp, self.hf_logits, self.folder = fsdp, hf_logits, folder
        self.noted, self.worst = [], 0.0

    def run(self, *command, fails=False):
        environment = dict(os.environ, OMP_NUM_THREADS="1", FSDP_BACKEND="shm")
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True,
                              env=environment, cwd=self.folder)
        if (done.returncode != 0) != fails:
            sys.exit(f"{command} returned {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stderr if fails else done.stdout

    # --- logits ---

    def compare(self, name, folder, model=None):
        """Notes a comparison of a directory's logits with those of transformers."""
        model = model or reference(folder)
        ids = torch.randint(0, VOCAB, (40,))
        with torch.no_grad():
            self.noted.append((name, folder, ids, model(ids.unsqueeze(0)).logits[0]))

    def compare_noted(self):
        """Makes the comparisons. One process computes all of ours: starting one takes longer."""
        words = []
        for number, (_, folder, ids, _) in enumerate(self.noted):
            ids.numpy().tofile(self.folder / f"ids-{number}")
            words += [folder, self.folder / f"ids-{number}", self.folder / f"logits-{number}"]
        self.run(self.hf_logits, *words)
        for number, (name, folder, ids, theirs) in enumerate(self.noted):
            ours = torch.from_file(str(self.folder / f"logits-{number}"), dtype=torch.float32,
                                   size=ids.numel() * VOCAB).view(ids.numel(), VOCAB)
            difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
            self.worst = max(self.worst, difference)
            print(f"{name:24} {len(list(folder.glob('*.safetensors')))} files, logits differ by "
                  f"{difference:.1e} of the largest")
            if not difference <= TOLERANCE:
                sys.exit(f"{name}: logits differ")

    def test_models(self):
        for number, (name, make) in enumerate(MODELS.items()):
            torch.manual_seed(number)
            model = make()
            randomize(model)
            for dtype, size in ((torch.float32, "5GB"), (torch.float32, "40KB"),
                                (torch.bfloat16, "40KB")):
                folder = self.folder / f"{name}-{str(dtype)[6:]}-{size}"
                model.to(dtype).save_pretrained(folder, max_shard_size=size)
                if size != "5GB" and not (folder / "model.safetensors.index.json").exists():
                    sys.exit(f"{folder}: is in one file")
                self.compare(folder.name, folder)
                model.to(torch.float32)

    def rewritten(self, source, name, change):
        """A copy of a directory with one weights file, whose tensors `change` has edited."""
        folder = self.folder / name
        folder.mkdir()
        shutil.copy(source / "config.json", folder)
        state = safetensors.torch.load_file(source / "model.safetensors")
        safetensors.torch.save_file(change(state), folder / "model.safetensors", {"format": "pt"})
        return folder

    def test_files_of_other_ages(self):
        def old_gpt2(state):
            state = {name.removeprefix("transformer."): value for name, value in state.items()}
            for layer in range(2):
                state[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
                state[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
            return state

        def with_frequencies(state):
            for layer in range(3):
                state[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.rand(8)
            return state

        def with_head(state):
            state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
            return state

        source = self.folder / "gpt2-float32-5GB"
        self.compare("old gpt2", self.rewritten(source, "old_gpt2", old_gpt2), reference(source))
        source = self.folder / "llama-float32-5GB"
        self.compare("old llama", self.rewritten(source, "old_llama", with_frequencies),
                     reference(source))
        source = self.folder / "llama_tied-float32-5GB"
        self.compare("tied, stored twice", self.rewritten(source, "tied_twice", with_head),
                     reference(source))

    def test_configs_of_transformers_4(self):
        source = self.folder / "llama3-float32-5GB"
        folder = self.folder / "llama3_old_config"
        shutil.copytree(source, folder)
        config = json.loads((folder / "config.json").read_text())
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope
        (folder / "config.json").write_text(json.dumps(config))
        self.compare("config of 4.x", folder, reference(source))

    # --- training ---

    def train(self, *words, fails=False):
        return self.run(self.fsdp, "train", *words, fails=fails)

    def losses(self, name):
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]

    def tokens(self):
        """Writes a file of tokens; returns the settings that read samples in its order."""
        path = self.folder / "tokens.bin"
        if not path.exists():
            torch.manual_seed(99)
            ids = torch.randint(0, VOCAB, (4001,))
            ids.to(torch.uint16).numpy().tofile(path)
        return ["--data.train", path, "--data.format", "nanogpt", "--data.seq", 16,
                "--data.shuffle=false", "--data.valid_share", 0, "--train.batch", 4,
                "--train.sample_tokens", 0, "--shard.precision", "fp32"]

    def expected_losses(self, folder, steps):
        model = reference(folder)
        ids = torch.from_file(str(self.folder / "tokens.bin"), dtype=torch.uint16, size=4001).long()
        found = []
        for step in range(steps):
            first = step * 4 * 16
            rows = torch.stack([ids[first + 16 * i: first + 16 * i + 17] for i in range(4)])
            with torch.no_grad():
                logits = model(rows[:, :-1]).logits
            found.append(torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), rows[:, 1:].flatten()).item())
        return found

    def test_training(self):
        for name in ("llama3-float32-40KB", "llama_tied-float32-40KB", "llama_head_dim-float32-5GB",
                     "qwen2-bfloat16-40KB", "gpt2-float32-40KB"):
            run = "run-" + name
            self.train("--ranks", 2, "--init-from", self.folder / name, *self.tokens(), "--dir", run,
                       "--steps", 3, "--optim.lr", 0, "--optim.warmup_steps", 0)
            ours, theirs = self.losses(run), self.expected_losses(self.folder / name, 3)
            print(f"{name:28} losses {ours} and {theirs}")
            if len(ours) != 3 or any(abs(a - b) > 2e-5 * b for a, b in zip(ours, theirs)):
                sys.exit(f"{name}: losses differ")

    def test_resume_without_the_origin(self):
        origin = self.folder / "origin"
        shutil.copytree(self.folder / "llama-float32-40KB", origin)
        line = ["--ranks", 2, "--init-from", origin, *self.tokens(), "--dir", "resumed",
                "--optim.lr", 1e-3, "--optim.schedule", "constant", "--optim.warmup_steps", 0]
        self.train(*line, "--steps", 2)
        shutil.rmtree(origin)
        said = self.train(*line, "--steps", 4, "--resume")
        if "init_from is ignored" not in said or "after step 2" not in said:
            sys.exit(f"not resumed as expected: {said}")
        self.train("--ranks", 1, "--dir", "resumed", "--resume", "--steps", 5)
        if len(self.losses("resumed")) != 5:
            sys.exit("resumed: lines are missing")
        # A second run from that run's weights starts where the first ended.
        self.train("--ranks", 2, "--init-from", "resumed", *self.tokens(), "--dir", "second",
                   "--steps", 1, "--optim.lr", 0, "--optim.warmup_steps", 0)
        first = self.losses("second")[0]
        if abs(first - self.losses("resumed")[0]) < 1e-3:
            sys.exit("init_from a run: started from the initial weights of that run")

    # --- text ---

    def test_text(self):
        folder = self.folder / "texts"
        torch.manual_seed(7)
        model = llama()
        randomize(model)
        model.save_pretrained(folder)
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=VOCAB - 10, special_tokens=["<s>", "</s>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
        tokenizer.train_from_iterator(["the shard of a unit is gathered by each rank"] * 9, trainer)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(
            dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="</s>")))

        prompt = "the unit of"
        ids = tokenizer.encode(prompt).ids
        with torch.no_grad():
            made = reference(folder).generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12,
                                              eos_token_id=None, pad_token_id=0)[0].tolist()
        end = tokenizer.token_to_id("</s>")
        made = made[:made.index(end)] if end in made else made
        theirs = tokenizer.decode([id for id in made if id < tokenizer.get_vocab_size()])
        ours = self.run(self.fsdp, "generate", folder, "--prompt", prompt, "--temperature", 0,
                        "--tokens", 12, "--quiet")
        if ours.rstrip("\n") != theirs.rstrip("\n"):
            sys.exit(f"generate wrote {ours!r}, but transformers {theirs!r}")
        print(f"generate: {ours!r}")

        text = self.folder / "text.txt"
        text.write_text("each rank gathers the shard of a unit. " * 200)
        self.train("--ranks", 2, "--init-from", folder, "--data.train", text, "--data.seq", 16,
                   "--train.batch", 4, "--steps", 2, "--train.sample_tokens", 0, "--dir", "texted",
                   "--optim.warmup_steps", 0)
        if not (self.folder / "texted" / "tokenizer.json").exists():
            sys.exit("the run did not copy the tokenizer")

    # --- refusals ---

    def refused(self, words, *parts):
        said = self.train("--ranks", 2, *words, fails=True)
        for part in parts:
            if str(part) not in said:
                sys.exit(f"{part!r} is not in: {said}")

    def test_refusals(self):
        good = self.folder / "llama-float32-40KB"
        self.refused(["--init-from", good, *self.tokens(), "--steps", 1, "--model.dim", 128],
                     "model.dim is 128", "but 64")
        self.refused(["--init-from", self.folder / "nowhere", *self.tokens(), "--steps", 1],
                     "there is no directory")

        index = json.loads((good / "model.safetensors.index.json").read_text())["weight_map"]
        name, shard = sorted(index.items())[3]
        folder = self.folder / "missing_shard"
        shutil.copytree(good, folder)
        (folder / shard).unlink()
        self.refused(["--init-from", folder, *self.tokens(), "--steps", 1, "--dir", "x1"], shard,
                     "is missing")

        folder = self.folder / "missing_tensor"
        shutil.copytree(good, folder)
        state = safetensors.torch.load_file(folder / shard)
        state["another"] = state.pop(name)
        safetensors.torch.save_file(state, folder / shard, {"format": "pt"})
        self.refused(["--init-from", folder, *self.tokens(), "--steps", 1, "--dir", "x2"], shard, name)

        folder = self.folder / "cut"
        shutil.copytree(good, folder)
        with open(folder / shard, "r+b") as file:
            file.truncate(file.seek(0, 2) - 8)
        self.refused(["--init-from", folder, *self.tokens(), "--steps", 1, "--dir", "x3"], shard)

        folder = self.folder / "pickled"
        folder.mkdir()
        shutil.copy(good / "config.json", folder)
        torch.save({}, folder / "pytorch_model.bin")
        self.refused(["--init-from", folder, *self.tokens(), "--steps", 1, "--dir", "x4"],
                     "pytorch_model.bin", "save_pretrained")

        folder = self.folder / "other_shape"
        shutil.copytree(good, folder)
        config = json.loads((folder / "config.json").read_text())
        config["intermediate_size"] = 128
        (folder / "config.json").write_text(json.dumps(config))
        self.refused(["--init-from", folder, *self.tokens(), "--steps", 1, "--dir", "x5"],
                     "mlp.down_proj.weight", "shape")


def main():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tests = Tests(sys.argv[1], sys.argv[2], pathlib.Path(folder))
        for test in (tests.test_models, tests.test_files_of_other_ages,
                     tests.test_configs_of_transformers_4, tests.compare_noted, tests.test_training,
                     tests.test_resume_without_the_origin, tests.test_text, tests.test_refusals):
            test()
        print(f"passed; logits differ by at most {tests.worst:.1e}")


if __name__ == "__main__":
    main()
