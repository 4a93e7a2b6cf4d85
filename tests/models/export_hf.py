"""export_hf.py FILE: runs tiny models of Hugging Face's transformers with random weights and writes
their weights, logits, losses, gradients and the tokens that generate() adds. The file is written
with torch.save as nested dicts of tensors and numbers, which C++ reads with torch::pickle_load.
Exits with 77 if transformers can't be imported."""
import sys

try:
    import torch
    import transformers
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(77)

VOCAB, TOKENS, NEW_TOKENS = 61, 12, 10
LLAMA = dict(vocab=VOCAB, dim=32, layers=2, heads=4, kv_heads=2, ffn=48)
SCALING = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=24)  # three kinds of waves among 8 frequencies
GPT2 = dict(vocab=VOCAB, max_tokens=40, dim=32, layers=2, heads=4)

# The names of the arguments are those of our configs.
CASES = {
    "llama": dict(LLAMA),
    "llama_one_group": dict(LLAMA, kv_heads=1, norm_eps=1e-3, rope_base=500.0),
    "llama_tied": dict(LLAMA, tied=True),
    "llama_head_dim": dict(LLAMA, head_dim=14),
    "llama_scaled": dict(LLAMA, head_dim=16, scaling=SCALING, tokens=40),
    "llama_right_padded": dict(LLAMA, padding="right"),
    "llama_left_padded": dict(LLAMA, padding="left"),
    "llama_documents": dict(LLAMA, documents=True),
    "qwen2": dict(LLAMA, qwen2=True),
    "qwen2_tied_left_padded": dict(LLAMA, qwen2=True, tied=True, padding="left"),
    "gpt2": dict(GPT2, gpt2=True),
    "gpt2_ffn": dict(GPT2, gpt2=True, ffn=20, norm_eps=1e-3),
    "gpt2_right_padded": dict(GPT2, gpt2=True, padding="right"),
    "gpt2_left_padded": dict(GPT2, gpt2=True, padding="left"),
    "gpt2_documents": dict(GPT2, gpt2=True, documents=True),
}

# Other families: transformers' own configs, which our reader of config.json reads.
SIZES = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, intermediate_size=48, pad_token_id=None, bos_token_id=None,
             eos_token_id=None)
LONG_ROPE = dict(rope_type="longrope", rope_theta=10000.0, long_factor=[1.5, 2.0, 3.0, 4.5],
                 short_factor=[1.0, 1.1, 1.2, 1.4], original_max_position_embeddings=16)
LONG = dict(rope_parameters=LONG_ROPE, max_position_embeddings=64,
            original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=3.0)
PARTIAL = dict(rope_theta=10000.0, partial_rotary_factor=0.75)
GEMMA3 = dict(head_dim=16, num_hidden_layers=3, sliding_window=5, query_pre_attn_scalar=24,
              layer_types=["sliding_attention", "sliding_attention", "full_attention"])
FAMILIES = {
    "qwen3": ("Qwen3", dict(head_dim=14)),
    "qwen3_tied_left_padded": ("Qwen3", dict(head_dim=14, tie_word_embeddings=True)),
    "mistral": ("Mistral", dict(sliding_window=5, head_dim=12)),
    "mistral_without_window": ("Mistral", dict(sliding_window=None)),
    "mistral_left_padded": ("Mistral", dict(sliding_window=5)),
    "mistral_right_padded": ("Mistral", dict(sliding_window=5)),
    "mistral_documents": ("Mistral", dict(sliding_window=3)),
    "smollm3": ("SmolLM3", dict(no_rope_layer_interval=2, num_hidden_layers=3)),
    "smollm3_left_padded": ("SmolLM3", dict(no_rope_layers=[0, 0])),
    "olmo2": ("Olmo2", dict(num_hidden_layers=3)),
    "olmo2_left_padded": ("Olmo2", {}),
    "phi3": ("Phi3", dict(sliding_window=5)),
    "phi3_longrope": ("Phi3", LONG),  # generates beyond the original context
    "phi3_longrope_longer": ("Phi3", LONG),
    "phi3_partial": ("Phi3", dict(rope_parameters=dict(PARTIAL, rope_type="default"))),
    "phi3_partial_longrope": ("Phi3", dict(LONG, rope_parameters=dict(
        LONG_ROPE, partial_rotary_factor=0.75, long_factor=[1.5, 2.0, 3.0], short_factor=[1.0, 1.1, 1.2]))),
    "qwen3_yarn": ("Qwen3", dict(head_dim=16, rope_parameters=YARN)),
    "qwen2_yarn_mscale": ("Qwen2", dict(rope_parameters=dict(
        YARN, beta_fast=4, beta_slow=0.5, mscale=0.7, mscale_all_dim=1.3, truncate=False))),
    "llama_yarn_attention": ("Llama", dict(rope_parameters=dict(YARN, attention_factor=1.2))),
    "llama_linear": ("Llama", dict(rope_parameters=LINEAR)),
    "gemma3": ("Gemma3Text", GEMMA3),
    "gemma3_linear": ("Gemma3Text", dict(GEMMA3, rope_parameters=dict(
        full_attention=LINEAR, sliding_attention=dict(rope_type="default", rope_theta=100.0)))),
    "gemma3_left_padded": ("Gemma3Text", GEMMA3),
    "gemma3_documents": ("Gemma3Text", GEMMA3),
}
FAMILIES.update({
    "mixtral": ("Mixtral", dict(num_local_experts=5, num_experts_per_tok=2)),
    "mixtral_left_padded": ("Mixtral", dict(num_local_experts=3, sliding_window=5)),
    "qwen3_moe": ("Qwen3Moe", dict(num_experts=6, num_experts_per_tok=3, head_dim=14,
                                   moe_intermediate_size=20, norm_topk_prob=True)),
    "qwen3_moe_documents": ("Qwen3Moe", dict(num_experts=4, num_experts_per_tok=2, head_dim=8,
                                             moe_intermediate_size=20)),
    "olmoe": ("Olmoe", dict(num_experts=5, num_experts_per_tok=3)),
    "dots1": ("Dots1", dict(n_routed_experts=6, n_shared_experts=2, num_experts_per_tok=3,
                            moe_intermediate_size=20, first_k_dense_replace=1, num_hidden_layers=3,
                            norm_topk_prob=True, routed_scaling_factor=1.5, head_dim=8,
                            sliding_window=None)),
})
for name, (family, settings) in FAMILIES.items():
    CASES[name] = dict(family=family, settings=dict(SIZES, **settings),
                       tokens=30 if name.endswith("longer") else TOKENS)
    for side in ("left", "right"):
        if name.endswith(side + "_padded"):
            CASES[name]["padding"] = side
    if name.endswith("documents"):
        CASES[name]["documents"] = True


def of_family(case):
    config = getattr(transformers, case["family"] + "Config")(**case["settings"])
    model = getattr(transformers, case["family"].removesuffix("Text") + "ForCausalLM")(config)
    case["json"] = model.config.to_json_string()
    return model


def llama(case):
    common = dict(
        vocab_size=case["vocab"], hidden_size=case["dim"], num_hidden_layers=case["layers"],
        num_attention_heads=case["heads"], num_key_value_heads=case["kv_heads"],
        intermediate_size=case["ffn"], tie_word_embeddings=case.get("tied", False))
    if case.get("qwen2"):
        rope = dict(rope_type="default", rope_theta=1e6)
        config = transformers.Qwen2Config(**common, rms_norm_eps=1e-6, rope_parameters=rope)
        return transformers.Qwen2ForCausalLM(config)
    rope = dict(rope_type="default", rope_theta=case.get("rope_base", 10000.0))
    if "scaling" in case:
        rope.update(case["scaling"], rope_type="llama3")
    if "head_dim" in case:
        common["head_dim"] = case["head_dim"]
    config = transformers.LlamaConfig(**common, rms_norm_eps=case.get("norm_eps", 1e-5),
                                      rope_parameters=rope)
    return transformers.LlamaForCausalLM(config)


def gpt2(case):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=case["vocab"], n_positions=case["max_tokens"], n_embd=case["dim"],
        n_layer=case["layers"], n_head=case["heads"], n_inner=case.get("ffn"),
        layer_norm_epsilon=case.get("norm_eps", 1e-5), embd_pdrop=0.0, attn_pdrop=0.0,
        resid_pdrop=0.0))


def randomize(model):
    """Weights large enough for every part to matter; the initial 0, 1 or 0.02 hide mistakes."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            else:
                parameter.uniform_(0.5, 1.5)
                if "Gemma" in type(model).__name__:  # multiplies by 1 + weight
                    parameter.sub_(1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)


def inputs_of(case):
    """ids, targets, and the masks of the case."""
    tokens = case.get("tokens", TOKENS)
    made = dict(ids=torch.randint(0, VOCAB, (3, tokens)), targets=torch.randint(0, VOCAB, (3, tokens)))
    made["targets"][0, 2] = -100
    if "padding" in case:
        real = torch.arange(tokens).expand(3, -1) < torch.tensor([[tokens], [tokens - 5], [1]])
        made["padding"] = real.flip(1) if case["padding"] == "left" else real
        made["targets"][~made["padding"]] = -100
    if case.get("documents"):
        breaks = torch.tensor([[4, 9], [1, 2], [tokens, tokens]])  # where the next one begins
        made["documents"] = (torch.arange(tokens).view(1, -1, 1) >= breaks.view(3, 1, 2)).sum(-1)
    return made


def mask_of(inputs, config):
    """The mask and positions that transformers takes, or nothing."""
    if "padding" in inputs:
        positions = (inputs["padding"].long().cumsum(1) - 1).clamp(min=0)
        return dict(attention_mask=inputs["padding"].long(), position_ids=positions)
    if "documents" in inputs:
        documents = inputs["documents"]
        seen = documents.unsqueeze(1) == documents.unsqueeze(2)
        seen &= torch.ones_like(seen[0]).tril()
        window = getattr(config, "sliding_window", None)
        near = seen if window is None else seen & torch.ones_like(seen[0]).triu(1 - window)
        full, sliding = (torch.zeros(one.shape).masked_fill(~one, torch.finfo(torch.float32).min)
                         .unsqueeze(1) for one in (seen, near))
        if config.model_type == "gemma3_text":
            return dict(attention_mask=dict(full_attention=full, sliding_attention=sliding))
        return dict(attention_mask=sliding)
    return {}


def export(case):
    make = of_family if "family" in case else gpt2 if case.get("gpt2") else llama
    model = make(case)
    randomize(model)
    model.eval()
    model.set_attn_implementation("eager")
    inputs = inputs_of(case)
    logits = model(inputs["ids"], use_cache=False, **mask_of(inputs, model.config)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["targets"].flatten())
    loss.backward()
    result = dict(inputs, logits=logits.detach(), loss=loss.detach(),
                  config={k: v for k, v in case.items() if k != "settings"},
                  weights={name: value.clone() for name, value in model.state_dict().items()},
                  gradients={name: p.grad for name, p in model.named_parameters()})
    if case.get("padding") != "right" and "documents" not in inputs:
        real = inputs.get("padding", torch.ones_like(inputs["ids"])).long()
        with torch.no_grad():
            result["generated"] = model.generate(
                inputs["ids"], attention_mask=real, do_sample=False, pad_token_id=0,
                eos_token_id=None, max_new_tokens=NEW_TOKENS)[:, inputs["ids"].size(1):]
    return result


def preferences():
    """Direct preference optimization as TRL computes it: with adapters on some linears, the loss, the
    rewards and the adapters' gradients. Each answer is a sequence of its own."""
    beta, rank, scale = 0.3, 2, 1.5
    case = dict(LLAMA)
    model = llama(case)
    randomize(model)
    model.eval()
    adapters = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            rows, columns = module.weight.shape
            adapters[name + ".lora_A.weight"] = (0.2 * torch.randn(rank, columns)).requires_grad_()
            adapters[name + ".lora_B.weight"] = (0.2 * torch.randn(rows, rank)).requires_grad_()
    base = {name: value.detach().clone() for name, value in model.named_parameters()}
    adapted = dict(base)
    for name in adapters:
        if ".lora_A." in name:
            linear = name.removesuffix(".lora_A.weight")
            adapted[linear + ".weight"] = base[linear + ".weight"] + scale * (
                adapters[linear + ".lora_B.weight"] @ adapters[name])

    def log_probability(weights, ids, prompt):
        logits = torch.func.functional_call(model, weights, (ids[None, :-1],), dict(use_cache=False)).logits
        each = logits[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        return each[prompt - 1:].sum()

    lengths = [(3, 4, 6), (5, 2, 1), (1, 7, 7)]  # of the prompt and both answers
    sequences, prompts, rewards = [], [], []
    for prompt, *answers in lengths:
        start = torch.randint(0, VOCAB, (prompt,))
        for answer in answers:
            ids = torch.cat([start, torch.randint(0, VOCAB, (answer,))])
            with torch.no_grad():
                reference = log_probability(base, ids, prompt)
            rewards.append(beta * (log_probability(adapted, ids, prompt) - reference))
            sequences.append(ids)
            prompts.append(prompt)
    rewards = torch.stack(rewards).view(-1, 2)
    loss = -torch.nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1]).mean()
    loss.backward()
    return dict(config=case, weights=base, beta=beta, rank=rank, alpha=scale * rank,
                adapters={name: value.detach() for name, value in adapters.items()},
                gradients={name: value.grad for name, value in adapters.items()},
                ids=torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True),
                lengths=torch.tensor([len(one) for one in sequences]),
                prompts=torch.tensor(prompts), loss=loss.detach(), rewards=rewards.detach())


def main():
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    everything = {}
    for number, (name, case) in enumerate(CASES.items()):
        torch.manual_seed(number)
        everything[name] = export(case)
    torch.manual_seed(1000)
    everything["preferences"] = preferences()
    torch.save(everything, sys.argv[1])


if __name__ == "__main__":
    main()
