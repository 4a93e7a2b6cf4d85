#!/usr/bin/env python3
"""make_seeds.py FOLDER: writes the seeds of the fuzz targets, valid and hostile files, to
FOLDER/NAME/. Inputs that a target once failed on stay here, so that every run tries them.
"""
import json
import pathlib
import struct
import sys

ALL = {}  # (target, name): bytes


def seed(target, name, data):
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    assert (target, name) not in ALL, name
    ALL[target, name] = data


def with_cuts(target, name, data, cuts=10):
    """The whole file, and copies cut short at several lengths."""
    seed(target, name, data)
    for i in range(cuts):
        seed(target, f"{name}-cut-{i}", data[: len(data) * i // cuts])


# --- pickles, opcode by opcode ---

def name_of(module, attribute):
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value):
    if 0 <= value < 256:
        return b"K" + bytes([value])
    return b"\x8a\x08" + struct.pack("<q", value)


def several(*items):
    return b"(" + b"".join(items) + b"t"


def listed(*items):
    return b"](" + b"".join(items) + b"e"


def table(**items):
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


def pairs(*items):
    return b"}(" + b"".join(key + value for key, value in items) + b"u"


def whole(body):
    return b"\x80\x02" + body + b"."


def pickles():
    good = whole(pairs((text("a"), listed(number(1), number(-5), b"G" + struct.pack(">d", 0.5))),
                       (text("b"), several(b"N", b"\x88", b"\x89", text("é"))),
                       (text("c"), name_of("torch", "Size") + several(several(number(3))) + b"R"),
                       (text("d"), name_of("collections", "OrderedDict") + b")R"),
                       (text("e"), several(text("storage")) + b"Q")))
    with_cuts("pickle", "good", good)
    four = (b"\x80\x04\x95" + struct.pack("<Q", 18) + b"\x8c\x05torch\x94\x8c\x04Size\x94\x93)\x81"
            b"}b.")
    with_cuts("pickle", "protocol-4", four)
    hostile = {
        "system": whole(name_of("os", "system") + several(text("true")) + b"R"),
        "system-4": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
        "eval": whole(name_of("builtins", "eval") + several(text("1")) + b"R"),
        "class-of-class": whole(name_of("torch", "Size.__class__")),
        "long-name": whole(name_of("m" * 5000, "x" * 5000)),
        "control-name": whole(name_of("\x1b[2J", "\r\x07")),
        "no-newline": b"\x80\x02ctorch",
        "self": b"\x80\x02]q\x01h\x01a.",
        "self-in-tuple": b"\x80\x02]q\x01(h\x01\x85e.",
        "self-in-dict": b"\x80\x02}q\x01(Nh\x01u.",
        "self-in-state": whole(name_of("torch", "Size") + b")\x81q\x01h\x01b"),
        "deep-tuples": b"\x80\x02N" + b"\x85" * 20000 + b".",
        "deep-64": b"\x80\x02N" + b"\x85" * 63 + b".",
        "deep-65": b"\x80\x02N" + b"\x85" * 64 + b".",
        "deep-lists": b"\x80\x02" + b"]" * 20000 + b"a" * 19999 + b".",
        "deep-states": whole(name_of("torch", "Size") + b"q\x00)\x81" +
                             b"h\x00)\x81" * 3000 + b"b" * 3000),
        "marks": b"\x80\x02" + b"(" * 30000 + b".",
        "many-lists": b"\x80\x02" + b"]" * 30000 + b".",
        "bomb": (b"\x80\x02Nq\x00" + b"".join(b"h%ch%c\x86q%c0" % (i, i, i + 1)
                                              for i in range(60)) + b"0h\x3c."),
        "bomb-lists": (b"\x80\x02]q\x00" + b"".join(b"](" + b"h%c" % i * 100 + b"eq%c" % (i + 1)
                                                    for i in range(30)) + b"."),
        "text-of-4-GB": b"\x80\x02X\xff\xff\xff\xffabc.",
        "text-of-2^64": b"\x80\x04\x8d" + b"\xff" * 8 + b"abc.",
        "bytes-of-2^63": b"\x80\x04\x8e" + b"\x00" * 7 + b"\x80" + b"abc.",
        "frame-of-2^64": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
        "long-of-9": b"\x80\x02\x8a\x09" + b"\x01" * 9 + b".",
        "long-of-255": b"\x80\x02\x8a\xff" + b"\xff" * 255 + b".",
        "long-of-0": b"\x80\x02\x8a\x00.",
        "long-least": b"\x80\x02\x8a\x08" + b"\x00" * 7 + b"\x80.",
        "protocol-6": b"\x80\x06N.",
        "nan": b"\x80\x02G\x7f\xf8" + b"\x00" * 6 + b".",
        "not-utf8": whole(text(b"\xff\xfe\xc0\x80")),
        "memo-far": b"\x80\x02Nr\xff\xff\xff\xff0j\xff\xff\xff\xff.",
        "memo-never": b"\x80\x02j\x05\x05\x05\x05.",
        "key-alone": b"\x80\x02}(Nu.",
        "dict-state": whole(name_of("collections", "OrderedDict") + b")R}b"),
        "state-twice": whole(name_of("torch", "Size") + b")\x81NbNb"),
        "below-mark": b"\x80\x02N(\x85.",
        "pop-mark": b"\x80\x02N(0.",
        "duplicate-keys": whole(pairs(*[(text("key"), number(i)) for i in range(50)])),
        "empty": b"",
        "stop": b".",
    }
    for name, data in hostile.items():
        seed("pickle", name, data)


# --- .metadata ---

MODULE = "torch.distributed.checkpoint.metadata"
FILES = "torch.distributed.checkpoint.filesystem"


def size(*sizes):
    return name_of("torch", "Size") + several(several(*[number(n) for n in sizes])) + b"R"


def made(module, name, state):
    return name_of(module, name) + b")\x81" + state + b"b"


def properties(dtype="float32"):
    return made(MODULE, "TensorProperties", several(
        name_of("torch", dtype),
        name_of("torch.serialization", "_get_layout") + several(text("torch.strided")) + b"R",
        b"\x89", name_of(MODULE, "_MEM_FORMAT_ENCODING") + several(number(0)) + b"R", b"\x89"))


def chunk(offsets, sizes):
    return made(MODULE, "ChunkStorageMetadata", table(offsets=size(*offsets), sizes=size(*sizes)))


def tensor(sizes, chunks, dtype="float32"):
    return made(MODULE, "TensorStorageMetadata", table(
        properties=properties(dtype), size=size(*sizes),
        chunks=listed(*[chunk(*both) for both in chunks])))


def index(name, offsets=None):
    fields = {"fqn": text(name), "index": b"N" if offsets is None else number(0)}
    if offsets is not None:
        fields["offset"] = size(*offsets)
    return made(MODULE, "MetadataIndex", table(**fields))


def info(path="__0_0.distcp", offset=0, length=100, **more):
    return made(FILES, "_StorageInfo", table(
        relative_path=text(path), offset=number(offset), length=number(length), **more))


def metadata_of(entries, places, paths=b"}"):
    return whole(made(MODULE, "Metadata", table(
        state_dict_metadata=pairs(*entries), planner_data=paths, storage_data=pairs(*places),
        storage_meta=b"N", version=text("1.0.0"))))


def one_tensor(sizes=(4, 3), chunks=(((0, 0), (4, 3)),), dtype="float32", place=None):
    return metadata_of(
        [(text("w"), tensor(sizes, chunks, dtype))],
        [(index("w", offsets), place or info()) for offsets, _ in chunks],
        pairs((text("w"), several(text("model"), number(0), text("w")))))


def metadata():
    with_cuts("metadata", "good", one_tensor())
    with_cuts("metadata", "value", metadata_of(
        [(text("step"), name_of(MODULE, "BytesStorageMetadata") + b")\x81")],
        [(index("step"), info(length=7))], pairs((text("step"), several(text("step"))))), 5)
    seed("metadata", "two-parts",
         one_tensor((8, 3), (((0, 0), (4, 3)), ((4, 0), (4, 3))), "bfloat16"))
    seed("metadata", "scalar", one_tensor((), (((), ()),)))
    seed("metadata", "nothing", one_tensor((0, 3), (((0, 0), (0, 3)),)))
    seed("metadata", "system", metadata_of(
        [(text("w"), name_of("os", "system") + several(text("true")) + b"R")], []))
    most = 2**63 - 1
    seed("metadata", "overflow", one_tensor((most, most), (((0, 0), (most, most)),)))
    seed("metadata", "overflow-zero", one_tensor((most, most, 0), (((0, 0, 0), (most, most, 0)),)))
    seed("metadata", "below-zero", one_tensor((-4, 3), (((0, 0), (-4, 3)),)))
    seed("metadata", "beyond", one_tensor((4, 3), (((2, 0), (4, 3)),)))
    seed("metadata", "beyond-overflow", one_tensor((4, 3), (((most, 0), (4, 3)),)))
    seed("metadata", "dimensions", one_tensor((4, 3), (((0,), (4,)),)))
    seed("metadata", "many-dimensions", one_tensor((1,) * 70, (((0,) * 70, (1,) * 70),)))
    seed("metadata", "twice", one_tensor((4, 3), (((0, 0), (4, 3)),) * 3))
    seed("metadata", "overlap", one_tensor((4, 3), (((0, 0), (4, 3)), ((1, 0), (3, 3)))))
    for name, path in {"up": "../w", "root": "/etc/passwd", "dots": "..", "dot": ".", "no": "",
                       "zero": "a\0b", "long": "a" * 5000}.items():
        seed("metadata", "path-" + name, one_tensor(place=info(path)))
    seed("metadata", "place-most", one_tensor(place=info(offset=most, length=most)))
    seed("metadata", "place-below-zero", one_tensor(place=info(offset=-1)))
    seed("metadata", "transformed", one_tensor(
        place=info(transform_descriptors=listed(text("zstd")))))
    seed("metadata", "dtype", one_tensor(dtype="complex999"))
    seed("metadata", "no-place", metadata_of(
        [(text("w"), tensor((4, 3), (((0, 0), (4, 3)),)))], []))
    seed("metadata", "not-utf8", metadata_of(
        [(text(b"\xff\xfe"), tensor((), (((), ()),)))], [(index(b"\xff\xfe", ()), info())]))
    # Shared values that are copied at each use: memory far beyond the file's size.
    steps = b"(" + text("s" * 4000) + b"q\x01" + b"h\x01" * 2000 + b"tq\x02"
    seed("metadata", "path-bomb", metadata_of([], [], b"}(" + text("0") + steps + b"".join(
        text(str(i)) + b"h\x02" for i in range(1, 200)) + b"u"))
    many = (name_of("torch", "Size") + b"((" + b"K\x01" * 3000 + b"ttRq\x01")
    seed("metadata", "size-bomb", metadata_of([], [(made(MODULE, "MetadataIndex", table(
        fqn=text("0"), offset=many)), info() + b"q\x02")] + [(made(MODULE, "MetadataIndex", table(
            fqn=text(str(i)), offset=b"h\x01")), b"h\x02") for i in range(1, 60)]))
    parts = tensor((4,), (((0,), (4,)),)).replace(b"](" + chunk((0,), (4,)),
                                                 b"](" + chunk((0,), (4,)) + b"q\x01" +
                                                 b"h\x01" * 3000)
    seed("metadata", "chunk-bomb", metadata_of([(text("w"), parts)], [(index("w", (0,)), info())]))
    fields = b"}(" + b"NN" * 3000 + text("fqn") + text("w") + b"u"
    seed("metadata", "field-bomb", metadata_of([], [
        (made(MODULE, "MetadataIndex", fields) + b"q\x01", info() + b"q\x02")] +
        [(b"h\x01", b"h\x02")] * 1500))


# --- archives and items ---

def archive(records, zip64=True, **change):
    """An archive as torch.save writes it: stored records, a directory, both end records."""
    out, directory = b"", b""
    for name, data in records:
        name = ("archive/" + name).encode()
        directory += struct.pack("<IHHHHIIIIHHHHHII", 0x02014b50, 0, 0, 0x0808,
                                 change.get("method", 0), 0, 0, len(data),
                                 change.get("size", len(data)), len(name),
                                 len(change.get("extra", b"")), 0, 0, 0, 0,
                                 change.get("offset", len(out))) + name + change.get("extra", b"")
        padding = -(len(out) + 30 + len(name) + 4) % 64
        out += struct.pack("<IHHHIIIIHH", 0x04034b50, 0, 0x0808, 0, 0, 0, 0, 0, len(name),
                           4 + padding) + name + struct.pack("<HH", 0x4246, padding)
        out += b"Z" * padding + data
    count = change.get("count", len(records))
    begin, length = change.get("begin", len(out)), change.get("length", len(directory))
    end = len(out) + len(directory)
    out += directory
    if zip64:
        out += struct.pack("<IQHHIIQQQQ", 0x06064b50, 44, 0x031e, 45, 0, 0, count, count, length,
                           begin)
        out += struct.pack("<IIQI", 0x07064b50, 0, change.get("end64", end), 1)
    return out + struct.pack("<IHHHHIIH", 0x06054b50, 0, 0, count & 0xffff, count & 0xffff,
                             length & 0xffffffff, begin & 0xffffffff, 0)


def stored(dtype="FloatStorage", sizes=(2, 3), strides=(3, 1), first=0, key="0", elements=6):
    storage = several(text("storage"), name_of("torch", dtype), text(key), text("cpu"),
                      number(elements)) + b"Q"
    return whole(name_of("torch._utils", "_rebuild_tensor_v2") + several(
        storage, number(first), several(*[number(n) for n in sizes]),
        several(*[number(n) for n in strides]), b"\x89",
        name_of("collections", "OrderedDict") + b")R") + b"R")


def stored_v3(dtype="uint16", sizes=(2, 3), strides=(3, 1)):
    storage = several(text("storage"), name_of("torch.storage", "UntypedStorage"), text("0"),
                      text("cpu"), number(12)) + b"Q"
    return whole(name_of("torch._utils", "_rebuild_tensor_v3") + several(
        storage, number(0), several(*[number(n) for n in sizes]),
        several(*[number(n) for n in strides]), b"\x89",
        name_of("collections", "OrderedDict") + b")R", name_of("torch", dtype)) + b"R")


def item(pickled, data=bytes(range(24)), order=b"little", **change):
    return archive([("data.pkl", pickled), (".format_version", b"1"), ("byteorder", order),
                    ("data/0", data), ("version", b"3\n")], **change)


def archives():
    def place(data, offset=0, length=0):
        return struct.pack("<qq", offset, length) + data

    most = 2**63 - 1
    good = archive([("data.pkl", b"\x80\x02N."), ("byteorder", b"little"), ("data/0", b"1234")])
    with_cuts("zip", "good", place(good))
    for i in range(1, 10):
        seed("zip", f"later-{i}", place(good[len(good) * i // 10:]))
    seed("zip", "plain", place(archive([("data.pkl", b"N.")], zip64=False)))
    seed("zip", "middle", place(b"x" * 64 + good + b"y" * 9, 64, len(good)))
    seed("zip", "long", place(archive([("data.pkl", b"N." * 3000), ("version", b"3\n")])))
    for name, offset, length in (("most", most, most), ("far", most, 30), ("longer", 0, most),
                                 ("below", -1, 100), ("least", -most - 1, most),
                                 ("short", 0, 21), ("negative", 0, -5)):
        seed("zip", "place-" + name, place(good, offset, length))
    for name, change in {
            "count": {"count": 2**40}, "count-most": {"count": 2**64 - 1},
            "length": {"length": 2**40}, "length-most": {"length": 2**63},
            "begin": {"begin": 2**63 - 1}, "begin-most": {"begin": 2**64 - 1},
            "end64": {"end64": 2**64 - 1}, "end64-itself": {"end64": 0},
            "method": {"method": 8}, "size": {"size": 0xfffffffe}, "offset": {"offset": 0xfffffffe},
            "size-64": {"size": 0xffffffff, "extra": struct.pack("<HHQ", 1, 8, 2**63)},
            "size-64-most": {"size": 0xffffffff, "extra": struct.pack("<HHQ", 1, 8, 2**63 - 1)},
            "size-64-missing": {"size": 0xffffffff, "extra": struct.pack("<HH", 1, 0)},
            "offset-64": {"offset": 0xffffffff, "extra": struct.pack("<HHQ", 1, 8, 2**64 - 1)},
            "extra-long": {"extra": struct.pack("<HH", 1, 0xffff)},
            "extra-cut": {"extra": b"\1"}}.items():
        seed("zip", name, place(archive([("data.pkl", b"N."), ("version", b"3")], **change)))
    seed("zip", "same-names", place(archive([("data.pkl", b"N."), ("data.pkl", b"N" * 99)])))
    seed("zip", "empty", place(archive([])))

    with_cuts("item", "good", item(stored()), 5)
    seed("item", "v3", item(stored_v3()))
    seed("item", "value", item(whole(table(step=number(5)))))
    seed("item", "parameter", item(whole(
        name_of("torch._utils", "_rebuild_parameter") + several(stored()[2:-1], b"\x88", b"N") +
        b"R")))
    seed("item", "big-endian", item(stored(), order=b"big"))
    seed("item", "transposed", item(stored(sizes=(3, 2), strides=(1, 3))))
    seed("item", "one-shown-often", item(stored(sizes=(200, 300), strides=(0, 0))))
    seed("item", "holes", item(stored(sizes=(2, 2), strides=(4, 1))))
    seed("item", "overlapping", item(stored(sizes=(3, 4), strides=(1, 1))))
    seed("item", "scalar", item(stored(sizes=(), strides=())))
    seed("item", "nothing", item(stored(sizes=(0, most), strides=(most, 1))))
    seed("item", "larger", item(stored(sizes=(2, 4), strides=(4, 1))))
    seed("item", "overflow", item(stored(sizes=(most, most), strides=(most, most))))
    seed("item", "overflow-strides", item(stored(sizes=(2, 2), strides=(most, most))))
    seed("item", "below-zero", item(stored(sizes=(2, 3), strides=(-3, 1))))
    seed("item", "first-most", item(stored(first=most)))
    seed("item", "first-below", item(stored(first=-1)))
    seed("item", "first-last", item(stored(first=6, sizes=(0,), strides=(1,))))
    seed("item", "other-key", item(stored(key="../version")))
    seed("item", "strides-missing", item(stored(strides=(3,))))
    seed("item", "complex", item(stored("ComplexDoubleStorage", (1,), (1,))))
    seed("item", "half", item(stored("BFloat16Storage", (3, 4), (4, 1))))
    seed("item", "bool", item(stored("BoolStorage", (24,), (1,)), data=b"\2\3\xff" * 8))
    seed("item", "system", item(whole(name_of("posix", "system") + several(text("true")) + b"R")))
    seed("item", "many-dimensions", item(stored(sizes=(1,) * 500, strides=(1,) * 500)))


# --- safetensors ---

def safe(header, behind=0, length=None):
    if not isinstance(header, (bytes, str)):
        header = json.dumps(header)
    data = header if isinstance(header, bytes) else header.encode()
    return (struct.pack("<I", behind) +
            struct.pack("<Q", len(data) if length is None else length) + data)


def safetensors():
    def entry(begin, end, shape, dtype="F32"):
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    good = {"__metadata__": {"format": "pt"}, "a.weight": entry(0, 24, [2, 3]),
            "b": entry(24, 28, [2], "BF16"), "c": entry(28, 28, [0, 7]), "d": entry(28, 36, [], "I64")}
    with_cuts("safetensors", "good", safe(good, 36))
    seed("safetensors", "nothing", safe({}))
    seed("safetensors", "padded", safe(json.dumps({"a": entry(0, 4, [1])}) + "   ", 4))
    most = 2**63 - 1
    for name, value, behind in (
            ("hole", {"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, 12),
            ("overlap", {"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, 12),
            ("same-place", {"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, 4),
            ("not-to-the-end", {"a": entry(0, 4, [1])}, 5),
            ("beyond", {"a": entry(0, 4, [1])}, 3),
            ("backwards", {"a": entry(4, 0, [1])}, 4),
            ("negative", {"a": entry(-4, 0, [1])}, 4),
            ("negative-shape", {"a": entry(0, 4, [-1, -1])}, 4),
            ("shape-overflow", {"a": entry(0, 0, [2**32, 2**32])}, 0),
            ("shape-overflow-zero", {"a": entry(0, 0, [most, most, 0])}, 0),
            ("shape-most", {"a": entry(0, 4, [most])}, 4),
            ("shape-2^64", {"a": entry(0, 4, [2**64])}, 4),
            ("offset-2^64", {"a": entry(0, 2**64 - 1, [1])}, 4),
            ("fraction", {"a": entry(0, 4, [1.0])}, 4),
            ("text-for-number", {"a": entry("0", "4", ["1"])}, 4),
            ("three-offsets", {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, 4),
            ("one-offset", {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, 4),
            ("no-dtype", {"a": {"shape": [1], "data_offsets": [0, 4]}}, 4),
            ("unknown-dtype", {"a": entry(0, 4, [1], "F33")}, 4),
            ("unknown-field", {"a": {**entry(0, 4, [1]), "x": {}}}, 4),
            ("many-dimensions", {"a": entry(0, 4, [1] * 1000)}, 4),
            ("long-name", {"a" * 5000: entry(0, 4, [1])}, 4),
            ("control-name", {"\x1b[2J\0": entry(0, 4, [1])}, 4),
            ("metadata-number", {"__metadata__": {"a": 1}}, 0),
            ("metadata-list", {"__metadata__": []}, 0),
            ("list", [], 0), ("null", {"a": None}, 0)):
        seed("safetensors", name, safe(value, behind))
    one = json.dumps(entry(0, 4, [1]))
    seed("safetensors", "same-names", safe('{"a":%s,"a":%s}' % (one, one), 4))
    seed("safetensors", "same-names-escaped", safe('{"a":%s,"\\u0061":%s}' % (one, one), 4))
    seed("safetensors", "not-utf8", safe(b'{"\xff\xfe":' + one.encode() + b"}", 4))
    seed("safetensors", "lone-surrogate", safe('{"\\ud800":%s}' % one, 4))
    seed("safetensors", "nan", safe('{"a":NaN}'))
    seed("safetensors", "two-roots", safe("{}{}"))
    seed("safetensors", "zero-behind", safe(b"{}\0\0"))
    seed("safetensors", "deep", safe("[" * 20000))
    seed("safetensors", "deep-objects", safe('{"a":' * 10000))
    seed("safetensors", "large-number", safe('{"a":{"shape":[%s]}}' % ("9" * 5000)))
    for length in (0, 1, 2**31, 2**32, 10**8, 10**8 + 1, 2**63 - 1, 2**63, 2**64 - 9, 2**64 - 1):
        seed("safetensors", f"length-{length}", safe("{}", length=length))


# --- JSON: the manifest, config.json, tokenizer.json ---

def hostile_json(target, good, behind=""):
    """Inputs that any JSON reader should survive."""
    whole_text = json.dumps(good)
    with_cuts(target, "good", whole_text.encode(), 8)
    if behind:
        seed(target, "good-and-more", whole_text + behind)
    for name, value in {
            "empty": "", "nothing": "{}", "list": "[]", "number": "1", "text": '"a"', "null": "null",
            "nan": '{"a":NaN}', "zero": whole_text + "\0", "twice": whole_text * 2,
            "comment": "// a\n{}", "mark": "\ufeff" + whole_text, "deep": "[" * 30000,
            "deep-closed": "[" * 4000 + "]" * 4000, "deep-objects": '{"a":' * 8000,
            "exponent": '{"a":1e999999999}', "digits": '{"a":%s}' % ("9" * 4000),
            "lone-surrogate": '{"\\ud800":"\\udc00"}', "same-keys": '{"a":1,"a":2}'}.items():
        seed(target, "json-" + name, value)
    seed(target, "json-not-utf8", b'{"\xff":"\xc0\x80"}')
    # Every value replaced by others, one at a time.
    for key in good:
        for i, other in enumerate([None, -1, 2**63, 2**64, 1e308, 0.5, "x", [], {}, True]):
            if i % 3 == hash_of(key) % 3:
                seed(target, f"other-{key}-{i}", json.dumps({**good, key: other}))
    # Deep nesting inside a valid file: walking it must not need stack for each level.
    seed(target, "deep-inside", whole_text[:-1] + ',"x":' + "[" * 20000 + "]" * 20000 + "}")


def hash_of(word):
    return sum(word.encode())


def manifest():
    good = {"format": "fsdp manifest 1", "block": 262144, "own": "0123456789abcdef",
            "files": {".metadata": {"size": 812, "sums": "00112233445566ff"},
                      "__0_0.distcp": {"size": 262145, "sums": "0" * 32},
                      "empty": {"size": 0, "sums": ""}}}
    hostile_json("manifest", good)
    for name, file, sums in (("up", "..", {"size": 1, "sums": "0" * 16}),
                             ("slash", "a/b", {"size": 1, "sums": "0" * 16}),
                             ("zero", "a\0b", {"size": 1, "sums": "0" * 16}),
                             ("below-zero", "a", {"size": -1, "sums": ""}),
                             ("most", "a", {"size": 2**63 - 1, "sums": "0" * 16}),
                             ("beyond", "a", {"size": 2**63, "sums": ""}),
                             ("2^64", "a", {"size": 2**64 - 1, "sums": ""}),
                             ("fraction", "a", {"size": 1.5, "sums": "0" * 16}),
                             ("few", "a", {"size": 262145, "sums": "0" * 16}),
                             ("odd", "a", {"size": 1, "sums": "0" * 15}),
                             ("letters", "a", {"size": 1, "sums": "g" * 16}),
                             ("signed", "a", {"size": 1, "sums": "-" + "0" * 15}),
                             ("hexed", "a", {"size": 1, "sums": "0x" + "0" * 14}),
                             ("list", "a", []), ("null", "a", None)):
        seed("manifest", "file-" + name, json.dumps({**good, "files": {file: sums}}))
    seed("manifest", "deep-own", json.dumps(good).replace('"0123456789abcdef"',
                                                          "[" * 20000 + "]" * 20000))
    seed("manifest", "deep-format", json.dumps(good).replace('"fsdp manifest 1"',
                                                             "[" * 20000 + "]" * 20000))


def configs():
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256,
             "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
             "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
             "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False,
             "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
             "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": [2, 3]}
    hostile_json("config", llama)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    seed("config", "llama-3", json.dumps({**llama, "rope_scaling": scaling}))
    seed("config", "transformers-5", json.dumps(
        {**llama, "rope_parameters": {**scaling, "rope_theta": 5e5}, "dtype": "bfloat16"}))
    for key in scaling:
        for i, other in enumerate(["x", -1, 0, 1e400, {}, None]):
            seed("config", f"scaling-{key}-{i}",
                 json.dumps({**llama, "rope_scaling": {**scaling, key: other}}))
    for family in ("qwen3", "mistral", "smollm3", "olmo2", "phi3", "gemma3_text"):
        seed("config", family, json.dumps({
            **{key: value for key, value in llama.items() if key != "architectures"},
            "model_type": family, "num_key_value_heads": 2, "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"], "no_rope_layers": [1, 0]}))
    seed("config", "qwen2", json.dumps({**llama, "model_type": "qwen2", "use_sliding_window": False,
                                        "architectures": ["Qwen2ForCausalLM"]}))
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 256,
            "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_ctx": 128,
            "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
            "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "tie_word_embeddings": True}
    seed("config", "gpt2", json.dumps(gpt2))
    adapters = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "bias": "none",
                "target_modules": ["q_proj", "v_proj"], "use_rslora": False,
                "base_model_name_or_path": "base", "init_lora_weights": True, "rank_pattern": {}}
    seed("config", "adapters", json.dumps(adapters))
    seed("config", "dora", json.dumps({**adapters, "use_dora": True}))
    for base, config in (("llama", llama), ("gpt2", gpt2), ("adapters", adapters)):
        for key in [key for key, value in config.items() if isinstance(value, (int, float))]:
            for i, other in enumerate([0, -1, 7, 2**31, 2**62, 2**63, 1e18, 1e-320]):
                if i % 4 == hash_of(key) % 4:
                    seed("config", f"{base}-{key}-{i}", json.dumps({**config, key: other}))


def alphabet():
    seen = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    spelled = {byte: chr(byte) for byte in seen}
    spelled.update({byte: chr(256 + i) for i, byte in enumerate(hidden)})
    return [spelled[byte] for byte in range(256)]


def tokenizer(tokens="abcIt's123.Ġ", **change):
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    for merged in ("aa", "ab", "Ġa", "aaaa"):
        vocab[merged] = len(vocab)
    root = {"version": "1.0", "added_tokens": [
                {"id": len(vocab), "content": "<|endoftext|>", "special": True, "lstrip": False,
                 "rstrip": False, "single_word": False, "normalized": False}],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            "post_processor": {"type": "ByteLevel"}, "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocab,
                      "merges": ["a a", ["a", "b"], "Ġ a", "aa aa"]}}
    root.update(change)
    return root


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def words(*steps):
    return {"type": "Sequence", "pretokenizers": [
        *steps, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}


LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def tokenizers():
    texts = '\0{"eos_token":{"content":"<|endoftext|>"},"bos_token":"a"}\0aab <|endoftext|> \xff'
    hostile_json("tokenizer", tokenizer(), texts)
    seed("tokenizer", "all-bytes", json.dumps(tokenizer("".join(alphabet()))))
    model = tokenizer()["model"]
    patterns = {
        "llama-3": LLAMA3, "class": r"[a-z\d\-]+|[^\x{1F600}-\u4e00]", "possessive": r"\p{Lu}?+a++|.",
        "look": r"a(?=b)|a(?!c)|.", "optional": r"(?:a(?:b(?:c)?)?)?d|.", "properties": r"\P{^L}+|\S",
        "empty": "", "matches-nothing": "a*", "open": "(a", "close": "a)", "class-open": "[a",
        "range": "[z-a]", "brace": "a{3,1}", "brace-most": "a{99999}", "brace-beyond": "a{100000,}",
        "escape": "\\", "hex": r"\x{110000}", "hex-cut": r"\x{", "property": r"\p{Xx}",
        "property-cut": r"\p{L", "back": r"(a)\1", "lazy": "a+?", "twice": "a++*", "class-class": "[[a]]",
        "folded": "(?i:ss)", "unicode-folded": "(?i:é)", "alternatives": "|".join("abcdefghij" * 4),
        "deep": "(" * 60 + "a" + ")" * 60, "deep-50": "(?:" * 50 + "a" + ")" * 50,
        "long": "a" * 30000, "long-optional": "a?" * 4000 + "b", "long-groups": "(?:a)?" * 3000 + "b",
        "slow": "a*a*a*a*a*a*a*a*a*a*a*a*b|.", "slow-groups": "(?:a|aa)?" * 30 + "c|.",
        "slow-looks": "(?=a*(?=a*(?=a*(?=a*(?=a*b)))))a|.", "surrogate": "\ud800",
    }
    for name, pattern in patterns.items():
        seed("tokenizer", "pattern-" + name, json.dumps(
            tokenizer(pre_tokenizer=words(split(pattern)))) + "\0\0" + "a" * 60)
    def nested(inside):
        part = {"type": "NFC"}
        for _ in range(200):
            part = {"type": "Sequence", inside: [part]}
        return part

    for name, change in {
            "nfc": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}},
            "other-normalizer": {"normalizer": {"type": "Lowercase"}},
            "many-steps": {"pre_tokenizer": words(*[split("a+|.")] * 60)},
            "too-many-steps": {"pre_tokenizer": words(*[split(".")] * 1000)},
            "no-words": {"pre_tokenizer": None},
            "after-bytes": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "ByteLevel"}, {"type": "ByteLevel"}]}},
            "deep-words": {"pre_tokenizer": nested("pretokenizers")},
            "deep-normalizer": {"normalizer": nested("normalizers")},
            "prefix": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
            "template": {"post_processor": {"type": "TemplateProcessing", "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A"}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [0, 1], "tokens": ["a"]}}}},
            "template-unknown": {"post_processor": {"type": "TemplateProcessing", "single": [
                {"SpecialToken": {"id": "<s>"}}, {"Sequence": {}}],
                "special_tokens": {"<s>": {"ids": [99999]}}}},
            "template-wrong": {"post_processor": {"type": "TemplateProcessing", "single": [
                {"SpecialToken": 5}, {"Sequence": 1}], "special_tokens": {"": 7}}},
            "no-vocab": {"model": {**model, "vocab": {}}},
            "ids-below-zero": {"model": {**model, "vocab": {"a": -1}}},
            "ids-same": {"model": {**model, "vocab": {"a": 1, "b": 1}}},
            "ids-far": {"model": {**model, "vocab": {"a": 2**22 - 1}, "merges": []}},
            "ids-too-far": {"model": {**model, "vocab": {"a": 2**24 - 1}, "merges": []}},
            "ids-2^64": {"model": {**model, "vocab": {"a": 2**64 - 1}, "merges": []}},
            "ids-fraction": {"model": {**model, "vocab": {"a": 1.5}, "merges": []}},
            "token-empty": {"model": {**model, "vocab": {"": 0, "a": 1}, "merges": [" a", ["", "a"]]}},
            "merge-unknown": {"model": {**model, "merges": ["x y"]}},
            "merge-three": {"model": {**model, "merges": ["a a a"]}},
            "merge-twice": {"model": {**model, "merges": ["a a"] * 50}},
            "merge-numbers": {"model": {**model, "merges": [[1, 2], 3]}},
            "ignore-merges": {"model": {**model, "ignore_merges": True}},
            "unk": {"model": {**model, "unk_token": "a", "byte_fallback": True}},
            "dropout": {"model": {**model, "dropout": 0.5}},
            "added-wrong": {"added_tokens": [{"id": "5", "content": 5}]},
            "added-empty": {"added_tokens": [{"id": 90, "content": ""}]},
            "added-strip": {"added_tokens": [
                {"id": 90 + i, "content": word, "lstrip": True, "rstrip": True,
                 "single_word": i % 2 == 0} for i, word in enumerate([" ", "  ", "a", " a", "é"])]},
            "added-same-id": {"added_tokens": [{"id": 90, "content": "x"}, {"id": 90, "content": "y"}]},
    }.items():
        seed("tokenizer", name, json.dumps(tokenizer(**change)) + "\0\0  aab é a ")
    character_tokenizers()


def character_tokenizers():
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    decoder = {"type": "Sequence", "decoders": [
        {**replace, "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    vocab = {token: i for i, token in enumerate(
        ["<unk>", "a", "b", "▁", "ab", "▁a", "▁ab", *(f"<0x{byte:02X}>" for byte in range(0x80, 0x100))])}
    bpe = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": vocab,
           "merges": ["a b", "▁ a", ["▁a", "b"]]}
    unigram = {"type": "Unigram", "unk_id": 0, "byte_fallback": False, "vocab": [
        ["<unk>", 0], ["a", -1.5], ["b", -2], ["ab", -2.5], ["▁", -3], ["▁a", -3.5], ["x", -1e308]]}
    plain = {"normalizer": None, "pre_tokenizer": None, "decoder": decoder, "model": bpe, "added_tokens": [
        {"id": 500, "content": "<|endoftext|>", "special": True, "normalized": False},
        {"id": 501, "content": "<b a>", "normalized": True, "lstrip": True}]}
    prepend = {"type": "Prepend", "prepend": "▁"}
    regex = {"type": "Replace", "pattern": {"Regex": "a+b?"}, "content": "ba"}
    for name, change in {
            "llama-2": {"normalizer": {"type": "Sequence", "normalizers": [prepend, replace]}},
            "mistral": {"pre_tokenizer": metaspace},
            "gemma": {"normalizer": replace, "pre_tokenizer": {
                "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}},
            "unigram": {"model": unigram, "pre_tokenizer": metaspace},
            "unigram-bytes": {"model": {**unigram, "byte_fallback": True}, "normalizer": regex},
            "metaspace-decoder": {"decoder": metaspace},
            "strip": {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
            "doubles": {"normalizer": {"type": "Sequence", "normalizers": [
                {**replace, "pattern": {"String": "a"}, "content": "aa"}] * 60}},
            "whole": {"model": {**bpe, "ignore_merges": True, "fuse_unk": False}},
            "words": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Whitespace"}, {"type": "WhitespaceSplit"},
                {"type": "Digits", "individual_digits": False}, metaspace]}},
            **{f"split-{behavior}-{invert}": {"pre_tokenizer": {
                "type": "Split", "pattern": {"Regex": "[ab]"}, "behavior": behavior, "invert": invert}}
               for behavior in ("Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")
               for invert in (False, True)},
    }.items():
        seed("tokenizer", "characters-" + name, json.dumps(tokenizer(**{**plain, **change}))
             + "\0\0  aab é 12 ▁▁a ")
    seed("tokenizer", "config-wrong", json.dumps(tokenizer()) + '\0{"eos_token":{"content":5}}\0')
    seed("tokenizer", "config-list", json.dumps(tokenizer()) + "\0[1]\0")
    seed("tokenizer", "config-cut", json.dumps(tokenizer()) + '\0{"eos')


# --- token files ---

def tokens():
    def file(form, data, index=b""):
        return bytes([form]) + struct.pack("<H", len(index)) + index + data

    ids = struct.pack("<20H", *range(100, 120))
    for form in (0, 3):
        seed("tokens", f"nanogpt-{form}", file(form, ids))
        seed("tokens", f"nanogpt-odd-{form}", file(form, ids + b"\0"))
    seed("tokens", "nothing", file(0, b""))
    for name, start in (("elf", b"\x7fELF"), ("zip", b"PK\3\4"), ("gzip", b"\x1f\x8b\x08"),
                        ("pickle", b"\x80\2N"), ("numpy", b"\x93NUMPY"), ("text", b"words " * 5)):
        seed("tokens", "foreign-" + name, file(3, start + ids + b"."))
    for name, magic, version, count, width in (
            ("16", 20240520, 1, 20, 2), ("32", 20240801, 7, 10, 4), ("version", 20240520, 2, 20, 2),
            ("short", 20240520, 1, 21, 2), ("long", 20240520, 1, 19, 2), ("none", 20240520, 1, 0, 2),
            ("below-zero", 20240520, 1, -1, 2), ("least", 20240520, 1, -2**31, 2),
            ("most", 20240801, 7, 2**31 - 1, 4)):
        data = struct.pack("<IIi", magic, version, count).ljust(1024, b"\0") + ids
        seed("tokens", "llmc-" + name, file(1, data))
        seed("tokens", "llmc-auto-" + name, file(3, data))
    seed("tokens", "llmc-big-endian", file(1, struct.pack(">IIi", 20240520, 1, 20) + b"\0" * 1012))
    seed("tokens", "llmc-cut", file(1, struct.pack("<II", 20240520, 1)))

    def idx(lengths, documents, code=8, width=2, version=1, sequences=None, count=None, starts=None):
        if starts is None:
            starts = [sum(lengths[:i]) * width for i in range(len(lengths))]
        sequences = len(lengths) if sequences is None else sequences
        count = len(documents) if count is None else count
        return (b"MMIDIDX\0\0" + struct.pack("<QBqq", version, code, sequences, count) +
                struct.pack(f"<{len(lengths)}i", *lengths) +
                struct.pack(f"<{len(starts)}q", *starts) +
                struct.pack(f"<{len(documents)}q", *documents))

    good = idx([5, 10, 5], [0, 2, 3])
    seed("tokens", "megatron", file(2, ids, good))
    for i in range(8):
        seed("tokens", f"megatron-cut-{i}", file(2, ids, good[: len(good) * i // 8]))
    most = 2**63 - 1
    for name, index in {
            "int32": idx([5, 5], [0, 1, 2], 4, 4), "int64": idx([5], [0, 1], 5, 8),
            "bytes": idx([40], [0, 1], 1, 1), "type": idx([5, 10, 5], [0, 3], 6),
            "type-255": idx([5, 10, 5], [0, 3], 255), "version": idx([20], [0, 1], version=2),
            "version-big-endian": idx([20], [0, 1], version=2**56),
            "sequences-most": idx([20], [0, 1], sequences=most),
            "sequences-least": idx([20], [0, 1], sequences=-most - 1),
            "sequences-0": idx([], [0], sequences=0),
            "documents-most": idx([20], [0, 1], count=most),
            "documents-least": idx([20], [0, 1], count=-most - 1),
            "documents-0": idx([20], [], count=0),
            "length-below-zero": idx([25, -5], [0, 2]),
            "length-most": idx([2**31 - 1], [0, 1]), "empty": idx([0, 0], [0, 2]),
            "starts": idx([10, 10], [0, 2], starts=[20, 0]),
            "starts-most": idx([10, 10], [0, 2], starts=[0, most]),
            "documents-backwards": idx([10, 10], [0, 2, 1]),
            "documents-beyond": idx([10, 10], [0, 3]),
            "documents-not-0": idx([10, 10], [1, 2]),
            "documents-same": idx([10, 10], [0, 0, 1, 1, 2, 2]),
            "empty-sequences": idx([0, 10, 0, 10, 0], [0, 1, 2, 3, 4, 5]),
            "multimodal": good + b"\0\0\0"}.items():
        seed("tokens", "megatron-" + name, file(2, ids, index))


# --- our configs ---

def toml():
    good = ('\ufeff# first\r\ndir = \'C:\\x#y\' # a # b\r\nmodel.dim = 0x1_00\n  [ optim ]  # [not]\n'
            '\tlr=1_0e-0_4\n"beta1" = 0.5\n[data]\ntrain = [ # why\n  "a, b", \'c] # d\',\n\n'
            '  "\\u00e9\\U0001F600\\t\\"\\\\",\n]\nvalid = []\nshuffle = false\n[train]\n'
            'tokens = 2e9\nseed = +5\nbits = 0b101\nmode = 0o17\nx = -inf\ny = nan\n')
    with_cuts("toml", "good", good.encode(), 20)
    for name, value in {
            "empty": "", "key": "a", "value": "a =", "twice": "a = 1\na = 2", "header-twice": "[a]\n[a]",
            "header-open": "[a", "header-empty": "[]", "tables": "[[a]]", "inline": "a = {b = 1}",
            "lines": 'a = """b"""', "open": 'a = "b', "open-list": 'a = ["b"', "list": "a = [1, 2]",
            "comma": 'a = ["b" "c"]', "more": "a = 1 b", "escape": 'a = "\\x"', "escape-end": 'a = "\\',
            "escape-cut": 'a = "\\u12', "escape-surrogate": 'a = "\\uD800"',
            "escape-far": 'a = "\\U00110000"', "escape-signed": 'a = "\\u+123"', "zero": "a = 1\0",
            "control": 'a = "\x01\x7f"', "return": "a = 1\rb = 2\r", "returns": "\r\r\n\r",
            "number-most": "a = 9223372036854775807", "number-beyond": "a = 9223372036854775808",
            "number-least": "a = -9223372036854775808", "number-far": "a = 1e999",
            "number-near": "a = 1e-999", "number-zero": "a = 007", "number-under": "a = 1__0",
            "number-hex": "a = 0x", "number-point": "a = 1.", "number-minus": "a = -", "date":
            "a = 2020-01-01T00:00:00", "digits": "a = " + "9" * 5000, "exponent": "a = 1e" + "9" * 5000,
            "dots": "a..b = 1", "dotted": ".".join("a" * 3000) + " = 1", "quoted-key": '"a b" = 1',
            "table-and-key": "a = 1\n[a]\nb = 1", "dotted-and-table": "a.b = 1\n[a]\nc = 1",
            "inline-twice": "a = {b = 1, b = 2}", "inline-and-table": "a = {b = 1}\n[a.c]\nd = 1",
            "tables-deep": "[" + ".".join("a" * 3000) + "]", "lists-deep": "a = " + "[" * 5000,
            "lines-broken": 'a = """b\\\n  é"""', "outside": "é = 1\na = é\n\u00a0b = 2",
            "date-and-more": "a = 2020-01-01 1\n", "list-open": 'a = ["b",\n[c]\nd = 1',
            "long": 'a = "' + "b" * 7000 + '"',
            "commas": "a = [" + '"",' * 2000 + "]"}.items():
        seed("toml", name, value)
    seed("toml", "not-utf8", b'a = "\xff\xfe"\n\xff = 1')


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for make in (pickles, metadata, archives, safetensors, manifest, configs, tokenizers, tokens, toml):
        make()
    make_directory_seeds.make()
    for (target, name), data in ALL.items():
        folder = pathlib.Path(sys.argv[1]) / target
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name.replace("/", "_")).write_bytes(data)
    print(f"{len(ALL)} seeds, {sum(map(len, ALL.values())) / 1e6:.1f} MB")


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    sys.modules["make_seeds"] = sys.modules["__main__"]  # for the seeds below, which use this file's
    import make_directory_seeds
    main()
