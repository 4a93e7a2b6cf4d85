#!/usr/bin/env python3
"""families.py FSDP HF_LOGITS: every family of decoders, from transformers and back.

For each family a small model with random weights is written by transformers. `fsdp train
--init-from` trains it, or what `fsdp ckpt import` makes of it, on 1 to 3 ranks; its first loss must be what transformers computes. `fsdp
ckpt export` writes the result, which transformers loads, with the same logits (HF_LOGITS,
hf_logits.cpp) and the same greedy text as `fsdp generate`. Exits with 77 if a package is missing.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"

try:
    import torch
    import transformers
except ImportError as problem:
    print(f"skipped: {problem}")
    sys.exit(77)

SEQ, BATCH, STEPS, VOCAB = 24, 6, 2, 257  # of bytes, and the end of a text
PROMPT, NEW_TOKENS = "each rank", 30  # beyond windows and the original context of LongRoPE
SIZES = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, intermediate_size=48, pad_token_id=None, bos_token_id=None,
             eos_token_id=None, max_position_embeddings=64)
LONG_ROPE = dict(rope_type="longrope", rope_theta=10000.0, long_factor=[1.5, 2.0, 3.0],
                 short_factor=[1.0, 1.1, 1.2], original_max_position_embeddings=28,
                 partial_rotary_factor=0.75)
YARN = dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=16)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=8.0)
FAMILIES = {  # class, ranks, settings
    "qwen3": ("Qwen3", 2, dict(head_dim=16, rope_parameters=YARN)),
    "mistral": ("Mistral", 3, dict(sliding_window=7, head_dim=12)),
    "smollm3": ("SmolLM3", 1, dict(no_rope_layer_interval=2)),
    "olmo2": ("Olmo2", 2, {}),
    "phi3": ("Phi3", 3, dict(rope_parameters=LONG_ROPE, original_max_position_embeddings=28,
                             sliding_window=40)),
    "gemma3": ("Gemma3Text", 2, dict(
        head_dim=16, query_pre_attn_scalar=24, sliding_window=6,
        rope_parameters=dict(full_attention=LINEAR, sliding_attention=dict(
            rope_type="default", rope_theta=10000.0)),
        layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "mixtral": ("Mixtral", 3, dict(num_local_experts=5, num_experts_per_tok=2)),
    "qwen3_moe": ("Qwen3Moe", 1, dict(head_dim=16, num_experts=6, num_experts_per_tok=3,
                                      moe_intermediate_size=20, norm_topk_prob=True)),
    "dots1": ("Dots1", 2, dict(head_dim=8, n_routed_experts=6, n_shared_experts=2,
                               num_experts_per_tok=3, moe_intermediate_size=20,
                               first_k_dense_replace=1, sliding_window=None)),
    "gemma3-images": ("Gemma3", 1, dict(
        head_dim=16, query_pre_attn_scalar=24, sliding_window=6, num_hidden_layers=6)),
}
IMAGES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
              image_size=28, patch_size=14)


def run(*command):
    environment = dict(os.environ, OMP_NUM_THREADS="1", FSDP_BACKEND="shm")
    done = subprocess.run([str(word) for word in command], capture_output=True, env=environment)
    said, errors = (out.decode(errors="replace") for out in (done.stdout, done.stderr))
    if done.returncode != 0:
        sys.exit(f"{command} returned {done.returncode}\n{said}\n{errors}")
    return said


def make(name):
    family, _, settings = FAMILIES[name]
    sizes = {**SIZES, **settings}
    if name == "gemma3-images":  # its text model is trained, and exported alone
        config = transformers.Gemma3Config(text_config=sizes, vision_config=IMAGES, mm_tokens_per_image=1,
                                           image_token_index=250, boi_token_index=251, eoi_token_index=252)
        model = transformers.Gemma3ForConditionalGeneration(config)
    else:
        config = getattr(transformers, family + "Config")(**sizes)
        model = getattr(transformers, family.removesuffix("Text") + "ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            else:
                parameter.uniform_(0.5, 1.5)
                if name.startswith("gemma3"):  # multiplies by 1 + weight
                    parameter.sub_(1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    return model.eval()


def loss_of(model, text):
    """Of the first batch, read in order."""
    ids = torch.tensor(list(text.encode()))
    rows = torch.stack([ids[SEQ * i: SEQ * i + SEQ + 1] for i in range(BATCH)])
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def train(fsdp, folder, name, text):
    """Trains from transformers' directory; returns the run's."""
    model = make(name)
    model.save_pretrained(folder / name)
    origin, out, ranks = folder / name, folder / (name + "-run"), FAMILIES[name][1]
    if ranks == 2:  # some by way of a checkpoint of ours
        origin = folder / (name + "-imported")
        run(fsdp, "ckpt", "import", folder / name, origin)
    run(fsdp, "train", "--ranks", ranks, "--init-from", origin, "--dir", out,
        "--data.train", folder / "text", "--data.tokenizer", "bytes", "--data.seq", SEQ,
        "--data.shuffle=false", "--data.valid_share", 0, "--train.batch", BATCH, "--steps", STEPS,
        "--train.sample_tokens", 0, "--shard.precision", "fp32", "--optim.lr", 0.01,
        "--optim.warmup_steps", 0)
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    ours = next(line["loss"] for line in lines if "loss" in line)
    theirs = loss_of(model, text)
    print(f"{name}: first loss {ours:.6f}, {theirs:.6f} by transformers")
    if not abs(ours - theirs) < 2e-5 * theirs:
        sys.exit(f"{name}: losses differ")
    return out


def check_text(fsdp, name, out, model):
    ids = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        made = model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None,
                              pad_token_id=0)[0, ids.size(1):].tolist()
    made = made[:made.index(256)] if 256 in made else made
    theirs = bytes(made).decode(errors="replace")
    ours = run(fsdp, "generate", out, "--prompt", PROMPT, "--temperature", 0, "--tokens",
               NEW_TOKENS, "--quiet")
    ours = ours.removeprefix(PROMPT).removesuffix("\n")
    if ours != theirs:
        sys.exit(f"{name}: generate wrote {ours!r}, transformers {theirs!r}")


def main():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    fsdp, hf_logits = sys.argv[1:3]
    text = "each rank gathers the shard of a unit, and reduces its gradient.\n" * 40
    with tempfile.TemporaryDirectory() as made:
        folder, words, expected = pathlib.Path(made), [], {}
        (folder / "text").write_text(text)
        ids = torch.randint(0, VOCAB, (50,))  # longer than all windows
        ids.numpy().tofile(folder / "ids")
        for name in FAMILIES:
            out = train(fsdp, folder, name, text)
            exported = folder / (name + "-exported")
            run(fsdp, "ckpt", "export", out, exported, "--dtype", "fp32")
            model, said = transformers.AutoModelForCausalLM.from_pretrained(
                exported, dtype=torch.float32, attn_implementation="eager",
                output_loading_info=True)
            if said["missing_keys"] or said["unexpected_keys"]:
                sys.exit(f"{name}: transformers misses or doesn't know tensors: {said}")
            with torch.no_grad():
                expected[name] = model.eval()(ids[None]).logits[0]
            words += [exported, folder / "ids", folder / (name + "-logits")]
            check_text(fsdp, name, out, model)
        run(hf_logits, *words)
        for name, theirs in expected.items():
            ours = torch.from_file(str(folder / (name + "-logits")), dtype=torch.float32,
                                   size=ids.numel() * VOCAB).view(-1, VOCAB)
            difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
            print(f"{name}: logits differ by {difference:.1e} of the largest")
            if not difference < 1e-5:
                sys.exit(f"{name}: logits differ")


if __name__ == "__main__":
    main()
