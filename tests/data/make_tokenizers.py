"""Trains byte-level BPE tokenizers with the `tokenizers` package and records its ids of texts.

    python3 make_tokenizers.py FOLDER

Writes into FOLDER, for each tokenizer NAME: NAME/tokenizer.json, NAME/corpus.ids (of corpus.bin, int32
in this machine's byte order), and NAME/strings.json: texts (as Base64) with their ids, their ids with
the template, and the text that the package decodes from them. Exits with 77 if the package is missing.
"""

import base64
import json
import os
import random
import sys

try:
    import numpy
    from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers,
                            pre_tokenizers, processors, trainers)
except ImportError as missing:
    print(missing)
    sys.exit(77)

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
CASED = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
         r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
         r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")

# Letters, digits, signs and marks of many scripts, and what separates words.
SCRIPTS = [range(0x61, 0x7B), range(0x61, 0x7B), range(0x41, 0x5B), range(0xC0, 0x180),
           range(0x391, 0x3CA), range(0x410, 0x450), range(0x5D0, 0x5EB), range(0x627, 0x64B),
           range(0x905, 0x93A), range(0xE01, 0xE2F), range(0x10D0, 0x10F1), range(0x1100, 0x1113),
           range(0x3041, 0x3097), range(0x4E00, 0x4F00), range(0xAC00, 0xAC80), range(0x10400, 0x10450)]
DIGITS = ["0123456789", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "௧௨௩", "ⅠⅡⅢⅻ", "½¾²³", "𝟎𝟏𝟐", "一二三"]
MARKS = ["\u0301", "\u0308", "\u0323", "\u094d", "\u0e31", "\u0e48", "\u064b", "\u20e3", "\u3099", "\u0346"]
SPACES = [" "] * 12 + ["  ", "   ", "\n", "\n\n", "\r\n", "\r\n\r\n", "\t", "\t\t", " \n", "\n ", "\v", "\f",
          "\u0085", "\u00a0", "\u00a0\u00a0", "\u1680", "\u180e", "\u2003", "\u2028", "\u2029", "\u202f",
          "\u205f", "\u3000", "\u3000 ", "\u200b", "\ufeff", " " * 40, "\n" * 9]
SIGNS = [".", ",", "!", "?!", "...", "(", ")", "[x]", "{", "}", "<", ">", "|", "'", "''", "\"", "``", "--",
         "—", "…", "#", "$", "€", "=", "==", "+", "->", "/", "\\", "。", "、", "「", "»", "\x00", "\x01", "\x1b[0m",
         "\x7f", "\u009f", "\u200d", "\ufffd", "\ue000", "\U0010ffff", "\u0378", "'s", "'S", "'\u017f", "'t",
         "'re", "'LL", "'ve", "'m", "'d", "'D", "’s", "://", "@", "_", "__init__", "*"]
EMOJI = ["😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "1️⃣", "❤️", "🧑🏿‍🚀", "☕", "🫠", "🪿"]
TOKENS = ["<|endoftext|>", "<|endoftext", "<|begin_of_text|>", "<|im_start|>", "<left>", "<right>",
          "<both>", "<word>", "<normal>", "caf\u00e9<é>", "cafe\u0301<e\u0301>", "ab<word>", "<word>cd",
          "  <left>", "<right>  ", " \n<both>\t\u3000", "<|endoftext|><|endoftext|>", "<wor<word>", "<longer><long", "[[a]]b",
          "[[a]]", "]]b", "<right>  <left>"]
BROKEN = [b"\x80", b"\xbf\xbf", b"\xc0\xaf", b"\xc3", b"\xe2\x82", b"\xe2\x28\xa1", b"\xed\xa0\x80", b"\xf0\x9f\x98",
          b"\xf0\x80\x80\x80", b"\xf4\x90\x80\x80", b"\xf8\x88\x80\x80\x80", b"\xff\xfe", b"\xe0\x80\xaf", b"\xf1\x80"]


def words(rng, count):
    """Words that come again, as those of a language do."""
    made = []
    for _ in range(count):
        script = rng.choice(SCRIPTS)
        letters = [chr(rng.choice(script)) for _ in range(rng.choice([1, 2, 3, 3, 4, 5, 6, 8, 11]))]
        if rng.random() < 0.1:
            letters.insert(rng.randrange(1, len(letters) + 1), rng.choice(MARKS))
        made.append("".join(letters))
    return made


def text(rng, lexicon, size):
    """Mixed text of about `size` bytes, as bytes."""
    pieces, length = [], 0
    while length < size:
        draw = rng.random()
        if draw < 0.45:
            piece = lexicon[min(int(rng.expovariate(0.004)), len(lexicon) - 1)]
        elif draw < 0.80:
            piece = rng.choice(SPACES)
        elif draw < 0.86:
            digits = rng.choice(DIGITS)
            piece = "".join(rng.choice(digits) for _ in range(rng.randrange(1, 9)))
        elif draw < 0.93:
            piece = rng.choice(SIGNS)
        elif draw < 0.96:
            piece = rng.choice(EMOJI)
        elif draw < 0.975:
            piece = rng.choice(TOKENS)
        elif draw < 0.985:
            piece = rng.choice(MARKS)
        elif draw < 0.99:
            piece = chr(rng.choice([rng.randrange(0x20, 0xD800), rng.randrange(0xE000, 0x110000)]))
        elif draw < 0.9905:
            piece = rng.choice("aé漢 \n'x") * rng.randrange(2, 300)
        else:
            piece = rng.choice(BROKEN)
        piece = piece if isinstance(piece, bytes) else piece.encode()
        pieces.append(piece)
        length += len(piece)
    return b"".join(pieces)


def trained(corpus, pre_tokenizer, normalizer=None, vocabulary=8000, alphabet=True, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=vocabulary, show_progress=False, special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else []))
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|im_start|>", "<longer>"])
    tokenizer.add_tokens([
        AddedToken("<left>", lstrip=True), AddedToken("<right>", rstrip=True),
        AddedToken("<both>", lstrip=True, rstrip=True), AddedToken("<word>", single_word=True),
        AddedToken("<normal>", normalized=True), AddedToken("é<é>", normalized=True),
        AddedToken("<long", normalized=False), AddedToken("[[a]]", normalized=False),
        AddedToken("]]b", normalized=False)])
    return tokenizer


def byte_level(**options):
    return pre_tokenizers.ByteLevel(**options)


def split(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated", invert=False),
                                    byte_level(add_prefix_space=False, use_regex=False)])


def tokenizers_to_test(corpus):
    begin = "<|begin_of_text|>"
    yield "gpt2", trained(corpus, byte_level(add_prefix_space=False))
    yield "prefix", trained(corpus, byte_level(add_prefix_space=True), vocabulary=3000)
    yield "gaps", trained(corpus, split(r"\p{N}+|[aeiou]"), vocabulary=2000)
    yield "whole", trained([line[:200] for line in corpus], byte_level(add_prefix_space=False, use_regex=False),
                           vocabulary=1000)
    yield "some_bytes", trained(["only a few letters of many"], byte_level(add_prefix_space=False),
                                vocabulary=60, alphabet=False)
    yield "cased", trained(corpus, split(CASED), vocabulary=3000)
    qwen = trained(corpus, split(QWEN2), normalizers.NFC(), vocabulary=4000)
    yield "qwen2", qwen
    llama = trained(corpus, split(LLAMA3), ignore_merges=True)
    llama.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=True),
        processors.TemplateProcessing(single=f"{begin} $A", pair=f"{begin} $A {begin} $B",
                                      special_tokens=[(begin, llama.token_to_id(begin))])])
    yield "llama3", llama


def strings(rng, lexicon):
    yield from [b"", b" ", b"  ", b"\n", b"a", b" a", b"a ", b"'", b"'s", b"I'M", b"x" * 5000, b" " * 5000,
                b"\n" * 3000, ("é" * 3000).encode(), b"\xff" * 50, b"ab" * 4000 + b"c", b"\r\n" * 100 + b"x"]
    yield from (piece.encode() for group in (SPACES, SIGNS, EMOJI, TOKENS, MARKS) for piece in group)
    yield from BROKEN
    for _ in range(600):
        yield text(rng, lexicon, rng.randrange(1, 60))
    for mark in MARKS:  # normalization
        yield ("e" + mark + "\u0323" + mark + "가\u11a8 \u1100\u1161\u11a8 \u212b \u2126 \ufb2c x").encode()


def case_of(tokenizer, text):
    readable = text.decode("utf-8", "replace")
    plain = tokenizer.encode(readable, add_special_tokens=False).ids
    return {"text": base64.b64encode(text).decode(), "ids": plain, "full": tokenizer.encode(readable).ids,
            "decoded": tokenizer.decode(plain, skip_special_tokens=False)}


def main(folder):
    rng = random.Random(5)
    lexicon = words(rng, 4000)
    corpus = text(rng, lexicon, 3_000_000)
    with open(os.path.join(folder, "corpus.bin"), "wb") as out:
        out.write(corpus)
    readable = corpus.decode("utf-8", "replace")
    training = readable[:400_000].split("\n")
    nasty = list(strings(rng, lexicon))
    for name, tokenizer in tokenizers_to_test(training):
        os.makedirs(os.path.join(folder, name), exist_ok=True)
        path = os.path.join(folder, name, "tokenizer.json")
        tokenizer.save(path)
        if name == "prefix":  # the older format of merges
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
            content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
            with open(path, "w", encoding="utf-8") as file:
                json.dump(content, file)
        if name in ("gpt2", "llama3", "qwen2"):
            ids = tokenizer.encode(readable, add_special_tokens=False).ids
            numpy.array(ids, dtype=numpy.int32).tofile(os.path.join(folder, name, "corpus.ids"))
        cases = [case_of(tokenizer, case) for case in nasty]
        with open(os.path.join(folder, name, "strings.json"), "w", encoding="utf-8") as out:
            json.dump(cases, out)


if __name__ == "__main__":
    main(sys.argv[1])
