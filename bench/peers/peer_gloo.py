"""The peer for CPU collectives: all-gather and reduce-scatter of torch's Gloo. Rank 0 prints one JSON line per size. GB/s = full buffer bytes / time.
Arguments: full buffer sizes in bytes (default 16 KiB, 1 MiB, 64 MiB)."""
import json, os, sys, time, torch, torch.distributed as dist
r, w = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]); torch.set_num_threads(1); dist.init_process_group("gloo", rank=r, world_size=w)
for n in [int(s) // 4 for s in sys.argv[1:]] or (1 << 12, 1 << 18, 1 << 24):
    full = torch.zeros(n); mine = full.chunk(w)[r].clone(); out = torch.zeros(n // w); res = {}
    for name, f in dict(all_gather=lambda: dist.all_gather_into_tensor(full, mine), reduce_scatter=lambda: dist.reduce_scatter_tensor(out, full)).items():
        for _ in range(3): f()
        k = 10 if n > 1 << 20 else 50; ts = []
        for _ in range(k): dist.barrier(); t = time.perf_counter(); f(); ts.append(time.perf_counter() - t)
        t = sorted(ts)[k // 2]; res[name + "_us"] = round(t * 1e6, 1); res[name + "_gbs"] = round(n * 4 / t / 1e9, 2)
    if r == 0: print(json.dumps(dict(peer="gloo", world=w, bytes=n * 4, **res)), flush=True)
dist.destroy_process_group()
