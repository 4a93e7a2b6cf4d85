"""Tokens per second of `fsdp generate` beside transformers on the CPU, with the same random weights.

    python3 bench/peers/peer_generate.py FSDP [--layers 24] [--tokens 48] [--rounds 3]

Writes a model in Qwen2.5 0.5B's shape (by default) into a temporary directory. Both take the likeliest
token after the same prompt, in float32, in turn; a line for each has its best round. The time of a
round is that of prompt and answer, without loading the model.
"""
import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import torch
import transformers

arguments = argparse.ArgumentParser()
arguments.add_argument("fsdp")
arguments.add_argument("--layers", type=int, default=24)
arguments.add_argument("--tokens", type=int, default=48)
arguments.add_argument("--rounds", type=int, default=3)
given = arguments.parse_args()

PROMPT = "each rank gathers the shard of a unit, and reduces its gradient."


def ours(folder):
    done = subprocess.run([given.fsdp, "generate", folder, "--tokenizer", "bytes", "--device", "cpu", "--prompt",
                           PROMPT, "--temperature", "0", "--tokens", str(given.tokens)],
                          capture_output=True, check=True)
    return float(re.search(rb"([\d.]+) per second", done.stderr).group(1))


def theirs(model):
    ids = torch.tensor([list(PROMPT.encode())])
    start = time.perf_counter()
    with torch.inference_mode():
        made = model.generate(ids, do_sample=False, max_new_tokens=given.tokens, eos_token_id=None, pad_token_id=0)
    return (made.size(1) - ids.size(1)) / (time.perf_counter() - start)


def main():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(1)
    config = transformers.Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=given.layers,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=None)
    model = transformers.Qwen2ForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as made:
        model.save_pretrained(pathlib.Path(made) / "model")
        rounds = [(ours(pathlib.Path(made) / "model"), theirs(model)) for _ in range(given.rounds)]
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters, {given.tokens} tokens, "
          f"{torch.get_num_threads()} threads")
    for name, speeds in zip(("fsdp generate", f"transformers {transformers.__version__}"), zip(*rounds)):
        print(f"{name}: {max(speeds):.2f} tokens/s (rounds: {', '.join(f'{one:.2f}' for one in speeds)})")


if __name__ == "__main__":
    sys.exit(main())
