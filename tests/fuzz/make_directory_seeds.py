"""Seeds of targets that read several files or messages: whole checkpoints, Hugging Face directories,
runs, JSON lines, long texts, and what launchers and ranks send each other. make_seeds.py calls it.
"""
import json
import pathlib
import struct

import make_seeds as m


def files(**contents):
    """One input with several files: `a_b` stands for the name in NAMES."""
    return b"".join(b"=== " + NAMES[key].encode() + b" ===\n" + (
        data.encode() if isinstance(data, str) else data) for key, data in contents.items())


NAMES = {"metadata": ".metadata", "first": "__0_0.distcp", "second": "__1_0.distcp",
         "manifest": ".manifest.json", "index": "model.safetensors.index.json",
         "model": "model.safetensors", "config": "config.json",
         "one": "model-00001-of-00002.safetensors", "two": "model-00002-of-00002.safetensors",
         "metrics": "metrics.jsonl", "events": "events.jsonl", "toml": "config.toml",
         "profile": "profile.json"}


def checkpoints():
    tensor = m.item(m.stored())
    value = m.item(m.whole(m.number(5)), b"")
    later = -len(tensor) % 64
    first = tensor + b"\0" * later + value
    at = len(tensor) + later
    whole = (m.text("model"), m.text("a"))

    def metadata(shown=(2, 3), chunks=(((0, 0), (2, 3)),), length=len(tensor), name="model.a",
                 file="__0_0.distcp", more=(), index_=b"K\0"):
        return m.metadata_of(
            [(m.text(name), m.tensor(shown, chunks)),
             (m.text("extra.step"), m.name_of(m.MODULE, "BytesStorageMetadata") + b")\x81"), *more],
            [(m.index(name, offsets), m.info(file, 0, length)) for offsets, _ in chunks] +
            [(m.index("extra.step"), m.info("__0_0.distcp", at, len(value)))],
            m.pairs((m.text(name), m.several(*whole)),
                    (m.text("extra.step"), m.several(m.text("extra"), index_, m.text("step")))))

    parts = (((0, 0), (2, 3)), ((2, 0), (2, 3)))
    for flag in (b"0", b"1"):  # as it is, or with a manifest that fits
        def seed(name, data):
            m.seed("checkpoint", name + "-" + flag.decode(), flag + data)
        good = files(metadata=metadata(), first=first, second=b"")
        seed("good", good)
        for i in range(8):
            seed(f"cut-{i}", good[: len(good) * i // 8])
        seed("second", files(metadata=metadata(file="__1_0.distcp"), first=first, second=tensor))
        seed("no-second", files(metadata=metadata(file="__1_0.distcp"), first=first))
        seed("swapped", files(first=tensor, second=first, metadata=metadata()))
        seed("parts", files(metadata=metadata((4, 3), parts), first=first))
        seed("large", files(metadata=metadata((2**20, 2**20), (((0, 0), (2**20, 2**20)),)), first=first))
        seed("repeated", files(metadata=metadata((2**10, 2**10), (((0, 0), (2**10, 2**10)),)),
                               first=m.item(m.stored(sizes=(2**10, 2**10), strides=(0, 0)))))
        seed("shape", files(metadata=metadata((3, 2), (((0, 0), (3, 2)),)), first=first))
        seed("longer", files(metadata=metadata(length=2**40), first=first))
        seed("state-dict", files(metadata=metadata(name="w"), first=first))
        seed("list", files(metadata=metadata(index_=m.number(2**40)), first=first))
        seed("manifest", files(metadata=metadata(), first=first, manifest=(
            '{"block":262144,"files":{"__0_0.distcp":{"size":9,"sums":"0000000000000000"}},'
            '"format":"fsdp manifest 1","own":"0000000000000000"}')))

    m.with_cuts("extra", "tensor", tensor, 4)
    for name, body in {"number": m.number(-5), "real": b"G" + struct.pack(">d", 0.5), "none": b"N",
                       "text": m.text("[train]\nsteps = 5\n"), "true": b"\x88",
                       "list": m.listed(m.number(1), m.text("a"), b"N"),
                       "dict": m.table(a=m.number(1), b=m.listed()),
                       "repeated": b"(" + m.text("s" * 4000) + b"q\x01" + b"h\x01" * 2000 + b"t",
                       "bomb": b"Nq\x00" + b"".join(b"h%ch%c\x86q%c0" % (i, i, i + 1)
                                                    for i in range(50)) + b"h\x32",
                       "object": m.name_of("os", "system") + b"(t)R"}.items():
        m.seed("extra", "value-" + name, m.item(m.whole(body), b""))
    for name, sizes, strides in (("repeated", (2, 3), (0, 0)), ("large", (2**31, 2**31), (0, 0)),
                                 ("column", (2, 3), (1, 0))):
        m.seed("extra", "tensor-" + name, m.item(m.stored(sizes=sizes, strides=strides)))


def hugging_face():
    one = m.safe({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 0) + b"x" * 8
    two = m.safe({"b": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}, 0) + b"y" * 8
    one, two = one[4:], two[4:]  # without the number of bytes that another target takes
    shard = "model-0000{}-of-00002.safetensors".format

    def index(weights, **more):
        return json.dumps({"metadata": {"total_size": 16}, "weight_map": weights, **more})

    good = files(index=index({"a": shard(1), "b": shard(2)}), one=one, two=two, config="{}")
    m.with_cuts("index", "good", good, 8)
    m.seed("index", "single", files(model=one, config="{}"))
    for name, weights in {
            "missing": {"a": shard(1), "b": shard(2), "c": shard(2)}, "unlisted": {"a": shard(1)},
            "up": {"a": "../model.safetensors"}, "root": {"a": "/etc/passwd.safetensors"},
            "other": {"a": "model.bin"}, "number": {"a": 5}, "none": {}, "itself": {
                "a": "model.safetensors.index.json"}, "control": {"a\x1b[2J": shard(1)},
            "long": {"a" * 5000: shard(1)}, "twice": {"a": shard(2), "b": shard(1)}}.items():
        m.seed("index", name, files(index=index(weights), one=one, two=two, config="{}"))
    m.seed("index", "deep", files(index="[" * 5000, one=one, config="{}"))
    m.seed("index", "deep-map", files(index=index({"a": [[[[[[[[[[]]]]]]]]]]}), config="{}"))
    m.seed("index", "empty", files(index="", one=b"", config=""))


def runs():
    steps = "".join(json.dumps({
        "step": i, "loss": 5 - i / 10, "lr": 1e-3, "tokens": 100 * i, "tokens_per_s": 1e4,
        "memory_mb": 10.5, "step_ms": 12, "data_ms": 1, "comm_ms": 2, "epoch": 0.1,
        "skipped": i == 3, "eval_loss": "NaN" if i == 4 else 4.5}) + "\n" for i in range(1, 9))
    events = "".join(json.dumps({"time": 1.7e9 + i, "step": i, "event": kind, **more}) + "\n"
                     for i, (kind, more) in enumerate([
                         ("start", {"world": 2, "hosts": 1, "device": "cpu"}),
                         ("warning", {"text": "<fuzz & \"quotes\">"}), ("checkpoint", {"bytes": 5}),
                         ("memory", {"kinds": [{"name": "a", "bytes": 5}], "world": 2}),
                         ("ranks", {"ranks": [{"rank": 0, "step_ms": 5}]}), ("resume", {}),
                         ("end", {"reason": "done"})]))
    profile = json.dumps({
        "step_ms": 10.0, "device": "cpu", "parts": [{"name": "forward", "ms": 4}],
        "families": [{"family": "matmul", "name": "matmul", "ms": 3, "kernels": []}],
        "units": [{"name": "layers.0", "ms": 2, "parts": [1, 2]}], "advice": ["a"],
        "kernels": [{"name": "<fuzz>", "ms": 1, "calls": 2}],
        "timeline": {"lanes": [{"name": "cpu", "spans": [[0, 1, "a"]]}], "ms": 10},
        "ranks": [{"rank": 0, "host": "h", "waited_ms": 1, "families": {"a": 1}}]})
    good = files(metrics=steps, events=events, toml="[train]\nsteps = 8\n", profile=profile)
    m.with_cuts("report", "good", good, 10)
    m.seed("report", "two-runs", files(metrics=steps + steps, toml="a = 1\n"))
    m.seed("report", "wrong", files(metrics='{"step":1.5}\n[]\n{"step":"1"}\n{"step":5,"loss":{}}\n',
                                    events='{"event":5}\n{"event":{}}\n', profile="[]"))
    m.seed("report", "most", files(metrics="".join(json.dumps(
        {"step": step, "loss": value}) + "\n" for step, value in (
            (-2**63, 1e308), (0, -1e308), (2**63 - 1, 1e-320), (2**64 - 1, 0)))))
    m.seed("report", "deep", files(metrics='{"step":1,"a":' + "[" * 3000 + "]" * 3000 + "}\n",
                                   events='{"event":"start","a":' + "[" * 900 + "]" * 900 + "}\n",
                                   profile="[" * 1000))
    m.seed("report", "keys", files(metrics="".join(
        json.dumps({"step": i, f"key{i}": i}) + "\n" for i in range(300))))
    for part, value in (("units", 5), ("families", {}), ("kernels", [5]), ("timeline", []), (
            "parts", [[]]), ("ranks", [{}]), ("step_ms", "x"), ("advice", [{}])):
        m.seed("report", "profile-" + part, files(metrics=steps, profile=json.dumps(
            {**json.loads(profile), part: value})))


def json_lines():
    good = '{"text":"a\\u00e9\\n"}\n\n  \r\n{"text":""}\n{"more":[1],"text":"b"}\n{"text":"c"}'
    m.with_cuts("jsonl", "text", good)
    m.with_cuts("jsonl", "prompt", '{"prompt":"a","completion":"b"}\n{"prompt":"","completion":""}\n', 6)
    for name, data in {
            "empty": "", "blank": " \n\t\r\n", "mixed": '{"text":"a"}\n{"prompt":"a","completion":"b"}',
            "both": '{"text":"a","prompt":"b","completion":"c"}\n', "number": '{"text":5}', "list": "[]\n",
            "deep": '{"text":' + "[" * 8000, "deep-beside": '{"a":' + "[" * 900 + "]" * 900 + ',"text":"a"}',
            "surrogate": '{"text":"\\ud800"}', "zero": '{"text":"\\u0000"}', "control": '{"text":"\x01"}',
            "twice": '{"text":"a","text":5}', "null": '{"text":null}', "prompt-only": '{"prompt":"a"}'}.items():
        m.seed("jsonl", name, data)
    turns = '[{"role":"user","content":"a"},{"role":"assistant","content":"b","tool_calls":[{"x":1}]}]'
    m.with_cuts("jsonl", "messages", '{"messages":%s}\n{"tools":"[1]","messages":%s}\n' % (turns, turns), 6)
    m.seed("jsonl", "share-gpt", '{"system":"s","conversations":[{"from":"human","value":"a"},'
                                 '{"from":"gpt","value":"b"}]}\n{"conversations":[{"from":"x"}]}\n')
    m.seed("jsonl", "alpaca", '{"instruction":"a","input":"i","output":"b"}\n{"instruction":"a","output":"b"}')
    m.seed("jsonl", "not-utf8", b'{"text":"\xff\xc3"}\n')
    m.seed("jsonl", "zero-byte", b'{"text":"a"}\0\n{"text":"b"}\n')


def launchers():
    failure = {"kind": 0, "node": 0, "rank": 1, "pid": 7, "code": 1, "signal": 0, "message": "m",
               "hint": "h", "last_lines": ["a", "\x1b[31mé"]}
    messages = [
        {"type": "hello", "version": 4, "nnodes": 2, "node": 1, "nproc": 4, "restart": 0},
        {"type": "plan", "run_id": "r", "nprocs": [1, 2], "node": 1, "master_port": 2000,
         "max_restarts": 3, "restart": 1, "grace_s": 0.5},
        {"type": "refused", "message": "a", "hint": "b"},
        {"type": "failed", "failure": failure}, {"type": "kill"}, {"type": "ended"},
        {"type": "ended", "last_lines": ["x"]}, {"type": "verdict", "restart": True},
        {"type": "verdict", "restart": False, "failure": failure}, {"type": "beat"},
        {"type": "replace", "restart": 1, "failure": failure},
        {"type": "let_go", "restart": 2, "master_port": 2000, "failure": failure},
        {"type": "reached", "restart": 2, "stage": 1}]
    for i, message in enumerate(messages):
        m.seed("launcher", f"message-{i}", json.dumps(message))
        for key in message:
            for j, value in enumerate((None, -1, 2**63, 1e999, "", [], {}, [[]])):
                text = json.dumps({**message, key: value})
                m.seed("launcher", f"message-{i}-{key}-{j}", text)
    m.seed("launcher", "all", "\n".join(map(json.dumps, messages)))
    m.seed("launcher", "more", '{"type":"kill","a":1}')
    m.seed("launcher", "twice", '{"type":"kill","type":"hello"}')
    m.seed("launcher", "deep", '{"type":' + "[" * 8000)
    m.seed("launcher", "deep-whole", '{"type":"kill","a":' + "[" * 900 + "]" * 900 + "}")
    m.seed("launcher", "not-utf8", b'{"type":"refused","message":"\xff","hint":""}')


def fields(*texts):
    return b"".join(str(len(t)).encode() + b":" + t for t in (
        t.encode() if isinstance(t, str) else t for t in texts))


def rank_messages():
    manifest = ('{"block":262144,"files":{},"format":"fsdp manifest 1","own":"0000000000000000"}')
    for which, name, data in (
            (0, "done", fields("done", "result")), (0, "failed", fields("failed", "what", "hint")),
            (0, "control", fields("failed", "\x1b[2J\n" * 900, "\r")), (0, "none", b""),
            (0, "many", fields(*[""] * 2000)), (0, "length", b"99999999999999999999:a"),
            (0, "far", b"18446744073709551615:a"), (0, "below", b"-1:a"), (0, "cut", b"4:do"),
            (1, "piece", fields("2", "text")), (1, "no-pieces", fields("0", "text")),
            (1, "most-pieces", fields("18446744073709551615", "text")),
            (2, "report", fields(m.one_tensor(), manifest)), (2, "swapped", fields(manifest, m.one_tensor()))):
        m.seed("messages", f"{which}-{name}", bytes([which]) + data)


def store():
    def message(call, *fields, wait=0):
        body = bytes([call]) + struct.pack("<Q", wait) + b"".join(
            struct.pack("<I", len(field)) + field for field in fields)
        return struct.pack("<I", len(body)) + body

    calls = [message(1, b"a", b"x" * 100), message(2, b"a", b"", b"y"), message(3, b"a", b"more"),
             message(4, b"n", b"5"), message(4, b"a", b"1"), message(4, b"n", b"9223372036854775807"),
             message(5, b"a"), message(6, b"n", b"n"), message(6, b"none", wait=5), message(7),
             message(8, b"n", b"none"), message(9), message(10)]
    m.with_cuts("store", "calls", b"1" + b"".join(calls), 20)
    for i, call in enumerate(calls):
        m.seed("store", f"call-{i}", b"1" + call)
    m.seed("store", "often", b"1" + message(1, b"", b"x" * 7000) + message(6, *[b""] * 200000))
    m.seed("store", "too-long", b"1" + struct.pack("<I", 2**32 - 1))
    m.seed("store", "field-too-long", b"1" + message(1, b"a")[:-5] + b"\xff" * 5)
    m.seed("store", "no-call", b"1" + message(0) + message(11) + message(255, b"a"))
    greeting = b"fsdp/1\r\n"
    for name, data in {"hello": greeting + b"n" * 32, "proof": greeting + b"n" * 64, "more": greeting +
                       b"n" * 200, "http": b"GET / HTTP/1.0\r\n\r\n", "other": b"fsdp/9\r\n" + b"n" * 64,
                       "cut": greeting[:5], "none": b""}.items():
        m.seed("store", "handshake-" + name, b"0" + data)


def texts():
    def spec(*words):
        return b"".join(bytes([len(word) - 1, power]) + word for word, power in words)

    for pattern in range(4):
        for chunk in (0, 9):
            head = bytes([pattern, chunk])
            for name, words in {
                    "word": [(b"a", 14)], "spaces": [(b" ", 14), (b"a", 0)], "lines": [(b"\r\n", 14), (b"x", 0)],
                    "digits": [(b"1", 14)], "mixed": [(b"ab ", 12), (b"\n", 10), (b" 'S", 11), (b"!", 10)],
                    "upper": [(b"A", 14), (b"1", 0)], "wide": [("漢é".encode(), 13), (b" ", 8)],
                    "marks": [("e\u0301".encode(), 12), ("\u0301".encode(), 12)], "bytes": [(b"\xff\xc3", 12)],
                    "tokens": [(b" <s> ", 12), (b"  ", 12)], "end": [(b"a", 14), (b"z", 0)],
                    "nothing": []}.items():
                m.seed("texts", f"{pattern}-{chunk}-{name}", head + spec(*words))


def chats():
    """Chat templates: those of tests/chat, and what hangs or eats memory where it isn't bounded."""
    for path in sorted((pathlib.Path(__file__).parent.parent / "chat/templates").glob("*.jinja")):
        m.seed("chat", path.stem, path.read_bytes())
    grow = "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = "
    for name, data in {
            "macros": "{% macro m(a, b=1) %}{{ a }}{{ caller() }}{% endmacro %}{% call m(2) %}x{% endcall %}",
            "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
            "text": grow + "n.x ~ n.x %}{% endfor %}", "lists": grow + "[n.x] %}{% endfor %}",
            "spaces": grow + "namespace(x=n) %}{% endfor %}", "raw": "{% raw %}{{ x }}{% endraw %}",
            "strings": "{{ '%5s|%d'|format('a', 3) }}{{ 'a,b'.split(',', 1)[::-1] }}{{ '{}'.format(1) }}",
            "filters": "{{ messages|map(attribute='role')|unique|list|sort|join(', ')|title|indent(2) }}",
            "brackets": "{{ " + "(" * 3000, "blocks": "{% if 1 %}" * 3000, "signs": "{{ " + "-" * 3000 + "1 }}",
            "numbers": "{{ 2 ** 63 }}{{ 7 // -2 % 3 }}{{ 1e400 }}{{ 0.1|round(3) }}",
            "conversation": "{% for m in messages %}{{ m.role }}{% endfor %}\n---\n"
                            '{"messages": [{"role": "assistant", "content": null}], "x": {"a": [1.5]}}',
            "deep": "{{ messages }}\n---\n" + '{"messages": [{"content": ' + "[" * 2000 + "]" * 2000 + "}]}"}.items():
        m.seed("chat", name, data)


def make():
    chats()
    for part in (checkpoints, hugging_face, runs, json_lines, launchers, rank_messages,
                 store, texts):
        part()
