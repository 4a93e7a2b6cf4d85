"""The floor of a step on this GPU: the time of each part alone.

Parts are timed with torch's own kernels, or computed from their bytes at the bandwidth of a copy.

python3 bench/floor.py [182m,953m,mlp,gqa,launch]: prints one table in ms per step (medians of CUDA events)."""
import sys, time, traceback
import torch

dev, bf, f32 = "cuda", torch.bfloat16, torch.float32
want = set(sys.argv[1].split(",")) if len(sys.argv) > 1 else {"182m", "953m", "mlp", "gqa", "launch"}
began = time.time()
rows, notes = [], []


def row(name, part, ms, note=""):
    rows.append((name, part, ms, note))
    print(f"  … {name} {part}: {ms if isinstance(ms, str) else round(ms, 3)} {note} [{time.time() - began:.0f} s]", file=sys.stderr, flush=True)


def attempt(name, part, f):
    """Runs f. A part that fails becomes a line of the table and doesn't end the run."""
    try:
        return f()
    except Exception as e:  # noqa: BLE001
        row(name, part, "failed", str(e).strip().split("\n")[0][:150])
        if not isinstance(e, RuntimeError): traceback.print_exc()
        return float("nan")


def median_ms(f, n=7, warm=2):
    for _ in range(warm): f()
    torch.cuda.synchronize()
    pairs = []
    for _ in range(n):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); f(); b.record(); pairs.append((a, b))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in pairs)[n // 2]


def graph_of(f):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side): f(); f()
    torch.cuda.current_stream().wait_stream(side)
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): f()
    return g


def both(name, part, f, note="", n=7):
    """Times f eagerly and as a graph. Returns the graph's time, which excludes the host."""
    def run():
        eager = median_ms(f, n)
        g = graph_of(f)
        ms = median_ms(g.replay, n)
        row(name, part, ms, f"eager {eager:.3f}" + (f"; {note}" if note else ""))
        del g
        return ms
    return attempt(name, part, run)


# ---- bandwidth ----
def copy_gbs(gib=4):
    x = torch.empty(gib << 30, dtype=torch.uint8, device=dev); y = torch.empty_like(x)
    ms = median_ms(lambda: y.copy_(x))
    gbs = 2 * x.numel() / ms / 1e6
    r = torch.empty(gib << 28, dtype=f32, device=dev).zero_()
    rd = median_ms(lambda: r.sum())
    wr = median_ms(lambda: r.zero_())
    row("-", "copy 4 GiB", ms, f"{gbs:.0f} GB/s read+write; sum (read) {r.numel() * 4 / rd / 1e6:.0f}, fill (write) {r.numel() * 4 / wr / 1e6:.0f} GB/s")
    return gbs
bandwidth = copy_gbs()
torch.cuda.empty_cache()
def by_bytes(n): return n / bandwidth / 1e6


def adamw(name, params, fused=True):
    for b, what in ((28, "fp32 gradient, fp32 or split master: reads 4+4+4+4, writes 4+4+4"),
                    (26, "bf16 gradient, split master (2+2 B), fp32 states: reads 2+4+4+4, writes 4+4+4"),
                    (22, "the same with one of the states in bf16")):
        row(name, f"AdamW {b} B/param by bytes", by_bytes(b * params), what)
    row(name, "gradient norm, 2 B by bytes", by_bytes(2 * params), "4 B: %.3f" % by_bytes(4 * params))
    if not fused: return
    def real():
        w, g, m, v = (torch.zeros(params, device=dev) for _ in range(4)); s = [torch.ones((), device=dev)]
        ms = median_ms(lambda: torch._fused_adamw_([w], [g], [m], [v], [], s, lr=1e-4, beta1=.9, beta2=.95, weight_decay=.1, eps=1e-8, amsgrad=False, maximize=False), 3, 1)
        row(name, "AdamW fp32 28 B, torch's fused, one tensor", ms, f"{28 * params / ms / 1e6:.0f} GB/s")
    attempt(name, "torch's fused AdamW", real); torch.cuda.empty_cache()


# ---- attention ----
def attention_ops(kind, q, k, v):
    o = torch.ops.aten
    if kind == "cudnn":  # None: no bias
        def fwd(): return o._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
        def bwd(r, g): return o._scaled_dot_product_cudnn_attention_backward(g, q, k, v, r[0], r[1], r[6], r[7], None, r[2], r[3], r[4], r[5], 0.0, True)
    else:
        def fwd(): return o._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)
        def bwd(r, g): return o._scaled_dot_product_flash_attention_backward(g, q, k, v, r[0], r[1], r[2], r[3], r[4], r[5], 0.0, True, r[6], r[7])
    return fwd, bwd


def attention(name, kind, L, B, T, H, KV, hd, packed=True):
    """Times forward and backward of L layers, scaled from a graph of 4. As in the model, q, k, v are views of one packed [B, T, (H+2KV)*hd]."""
    qkv = torch.randn(B, T, H + 2 * KV, hd, device=dev, dtype=bf)
    q, k, v = (t.transpose(1, 2) for t in qkv.split([H, KV, KV], 2))
    if not packed: q, k, v = (t.contiguous() for t in (q, k, v))
    fwd, bwd = attention_ops(kind, q, k, v)
    r = fwd(); g = torch.randn(B, T, H, hd, device=dev, dtype=bf).transpose(1, 2)
    grads = bwd(r, g)
    f = median_ms(graph_of(lambda: [fwd() and None for _ in range(4)]).replay) * L / 4
    b = median_ms(graph_of(lambda: [bwd(r, g) and None for _ in range(4)]).replay) * L / 4
    flops = L * 4 * B * H * T * T * hd / 2 * 3.5  # causal: half; backward 2.5 times forward
    row(name, f"attention {kind}{'' if packed else ' contiguous'}", f + b, f"forward {f:.3f} + backward {b:.3f}; {flops / (f + b) / 1e9:.0f} TFLOP/s; strides of output {tuple(r[0].stride())}, dq {tuple(grads[0].stride())}, lse {tuple(r[1].shape)} {r[1].dtype}")
    return f + b


def gqa():
    B, T, H, KV, hd, name = 16, 1024, 14, 2, 64, "GQA 14/2 hd64 T1024 B16, 24L"
    try:
        ms = attention(name, "cudnn", 24, B, T, H, KV, hd)
        row(name, "cudnn takes 2 kv heads directly", "YES", "")
    except Exception as e:  # noqa: BLE001
        row(name, "cudnn takes 2 kv heads directly", "NO", str(e).strip().split("\n")[0][:220])
    attempt(name, "flash with fewer kv heads", lambda: attention(name, "flash", 24, B, T, H, KV, hd))
    attempt(name, "cudnn, kv expanded to 14", lambda: attention(name + ", expanded", "cudnn", 24, B, T, H, H, hd))
    attempt(name, "flash, kv expanded to 14", lambda: attention(name + ", expanded", "flash", 24, B, T, H, H, hd))
    # compare fewer kv heads with expanded ones
    def check():
        q, k, v = (torch.randn(2, h, 256, hd, device=dev, dtype=bf) for h in (H, KV, KV))
        a = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)[0]
        r = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float().repeat_interleave(7, 1), v.float().repeat_interleave(7, 1), is_causal=True)
        row(name, "cudnn with 2 kv heads: largest error", (a.float() - r).abs().max().item(), "against float32 with expanded heads (about 0.01 is right)")
    attempt(name, "check", check)


# ---- matmuls of a Llama ----
def llama(name, L, d, H, T, B, V, ffn, goal):
    n = B * T
    shapes = {"qkv": (3 * d, d), "o": (d, d), "gate/up": (2 * ffn, d), "down": (d, ffn)}
    params = L * (sum(a * b for a, b in shapes.values()) + 2 * d) + 2 * V * d + d
    W = [{k: torch.randn(s, device=dev, dtype=bf).mul_(.02) for k, s in shapes.items()} for _ in range(L)]
    X = {k: torch.randn(n, s[1], device=dev, dtype=bf) for k, s in shapes.items()}
    Y = {k: torch.randn(n, s[0], device=dev, dtype=bf) for k, s in shapes.items()}
    GX = {k: torch.empty_like(t) for k, t in X.items()}
    OY = {k: torch.empty_like(t) for k, t in Y.items()}
    G16 = [{k: torch.empty(s, device=dev, dtype=bf) for k, s in shapes.items()} for _ in range(L)]
    flops = lambda keys: sum(2 * n * shapes[k][0] * shapes[k][1] for k in keys) * L
    def forward(keys):
        for w in W:
            for k in keys: torch.mm(X[k], w[k].t(), out=OY[k])
    def dx(keys):
        for w in W:
            for k in keys: torch.mm(Y[k], w[k], out=GX[k])
    def dw(keys, G):
        for g in G:
            for k in keys: torch.mm(Y[k].t(), X[k], out=g[k])
    def dw32(keys, G):
        for g in G:
            for k in keys: torch.mm(Y[k].t(), X[k], f32, out=g[k])
    total = 0.0
    every = list(shapes)
    for k in every:  # each alone, to show a slow one
        parts = []
        for what, f in (("forward", lambda: forward([k])), ("dX", lambda: dx([k])), ("dW", lambda: dw([k], G16))):
            ms = attempt(name, f"{k} {what}", lambda: median_ms(graph_of(f).replay, 5)); parts.append(f"{what} {ms:.3f} ({flops([k]) / ms / 1e9:.0f} TF)")
        row(name, f"  {k} {shapes[k]}", "", ", ".join(parts))
    for what, f in (("forward", lambda: forward(every)), ("dX", lambda: dx(every)), ("dW bf16", lambda: dw(every, G16))):
        ms = both(name, f"matmul {what}, {L} layers", f); total += ms
        notes.append(f"{name} {what}: {flops(every) / ms / 1e9:.0f} TFLOP/s")
    del G16
    G32 = [{k: torch.empty(s, device=dev, dtype=f32) for k, s in shapes.items()} for _ in range(L)]
    both(name, f"matmul dW float32 (out_dtype), {L} layers", lambda: dw32(every, G32), "not in the total")
    del G32; torch.cuda.empty_cache()
    # the head, in chunks of rows: the first chunk writes dW, the others add to it
    x, w = torch.randn(n, d, device=dev, dtype=bf), torch.randn(V, d, device=dev, dtype=bf).mul_(.02)
    gx, g16, g32 = torch.empty_like(x), torch.empty_like(w), torch.empty(V, d, device=dev)
    best = float("inf")
    for chunks in (1, 2, 4, 8):
        c = n // chunks
        if c < 64: continue
        logits = torch.randn(c, V, device=dev, dtype=bf)
        out = torch.empty_like(logits)
        def head(to32):
            for i in range(chunks):
                s = slice(i * c, (i + 1) * c)
                torch.mm(x[s], w.t(), out=out)
                torch.mm(logits, w, out=gx[s])
                if to32: torch.mm(logits.t(), x[s], f32, out=g32) if i == 0 else torch.addmm(g32, logits.t(), x[s], f32, out=g32)
                else: torch.mm(logits.t(), x[s], out=g16) if i == 0 else torch.addmm(g16, logits.t(), x[s], out=g16)
        ms = both(name, f"head forward+dX+dW bf16, chunks of {c}", lambda: head(False), f"{6 * n * V * d * 1e-9:.0f} GFLOP", 5)
        best = min(best, ms)
        both(name, f"head, dW float32, chunks of {c}", lambda: head(True), "not in the total", 5)
    total += best
    del W; torch.cuda.empty_cache()
    att = [attempt(name, f"attention {k}", lambda: attention(name, k, L, B, T, H, H, d // H)) for k in ("cudnn", "flash")]
    attempt(name, "attention cudnn contiguous", lambda: attention(name, "cudnn", L, B, T, H, H, d // H, packed=False))
    adamw(name, params)
    elementwise = 2 * L * n * (28 * d + 9 * ffn) + 2 * 3 * n * V
    row(name, "norms, rope, swiglu, loss by bytes", by_bytes(elementwise), f"{elementwise / 1e9:.1f} GB: 28 d + 9 ffn per row and layer, logits read twice and written once")
    update, norm, ew = by_bytes(26 * params), by_bytes(2 * params), by_bytes(elementwise)
    attn = min(a for a in att if a == a) if any(a == a for a in att) else float("nan")
    row(name, "FLOOR", total + attn + update + norm + ew,
        f"matmul {total:.2f} + attention {attn:.2f} + elementwise {ew:.2f} + norm {norm:.2f} + AdamW {update:.2f} (26 B); {params / 1e6:.0f}M parameters; goal {goal}")


def mlp():
    name, w, B, L = "MLP 8x20480 fp32 B64", 20480, 64, 8
    W = [torch.randn(w, w, device=dev).mul_(.01) for _ in range(L)]; G = [torch.empty(w, w, device=dev) for _ in range(L)]
    x, y, o = torch.randn(B, w, device=dev), torch.randn(B, w, device=dev), torch.empty(B, w, device=dev)
    bias = torch.zeros(w, device=dev)
    parts = {"forward": lambda: [torch.addmm(bias, x, m.t(), out=o) for m in W], "dX (7)": lambda: [torch.mm(y, m, out=o) for m in W[1:]],
             "dW": lambda: [torch.mm(y.t(), x, out=g) for g in G]}
    sums = {}
    for tf32 in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        sums[tf32] = sum(both(name, f"matmul {k}, {'tf32' if tf32 else 'fp32'}", f, "the peer doesn't use tf32" if tf32 else "", 5) for k, f in parts.items())
    torch.backends.cuda.matmul.allow_tf32 = False
    params = L * (w * w + w)
    nbytes = (8 + 7 + 8) * w * w * 4
    row(name, "matmul by bytes", by_bytes(nbytes), f"each weight read twice, each gradient written once; operations at 67 TFLOP/s: {2 * B * w * w * 23 / 67e9:.2f} ms")
    del W, G; torch.cuda.empty_cache()
    adamw(name, params)
    norm, update = by_bytes(4 * params), by_bytes(28 * params)
    row(name, "FLOOR", sums[False] + norm + update, f"matmul {sums[False]:.2f} + norm {norm:.2f} (4 B) + AdamW {update:.2f} (28 B); {params / 1e9:.2f}B parameters; goal 65")


def launch():
    x = torch.zeros(256, device=dev)
    def chain(): [x.add_(1) for _ in range(650)]
    both("launch", "650 tiny kernels in a chain", chain)
    g = graph_of(chain)
    t = time.perf_counter(); k = 50
    for _ in range(k): g.replay()
    host = (time.perf_counter() - t) / k * 1e3
    torch.cuda.synchronize()
    row("launch", "host time of one graph launch", host, "650 nodes")
    big = torch.zeros(256 * 768, device=dev, dtype=bf)
    both("launch", "650 kernels on 256 x 768 bf16", lambda: [big.add_(1) for _ in range(650)])


p = torch.cuda.get_device_properties(0)
torch.manual_seed(0)
if "launch" in want: attempt("launch", "launch", launch)
if "gqa" in want: attempt("gqa", "gqa", gqa)
torch.cuda.empty_cache()
if "182m" in want: attempt("182M", "row", lambda: llama("182M", 24, 768, 12, 256, 1, 8192, 2048, "6 ms"))
torch.cuda.empty_cache()
if "953m" in want: attempt("953M", "row", lambda: llama("953M", 16, 2048, 16, 2048, 4, 32000, 5632, "85 ms, 18.5 GB"))
torch.cuda.empty_cache()
if "mlp" in want: attempt("mlp", "row", mlp)

print(f"{p.name}, torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}; ms per step; {time.time() - began:.0f} s in all")
a, b = max(len(r[0]) for r in rows), max(len(r[1]) for r in rows)
for name, part, ms, note in rows:
    print(f"{name:<{a}}  {part:<{b}}  {ms if isinstance(ms, str) else f'{ms:.3f}':>9}  {note}")
for line in notes: print(line)
