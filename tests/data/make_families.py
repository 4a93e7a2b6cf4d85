"""Trains tokenizers as today's model families configure them, and records the package's ids of texts.

    python3 make_families.py FOLDER

Writes NAME/tokenizer.json and NAME/strings.json into FOLDER, as make_tokenizers.py does; with "decodes",
lists of random ids and the text that the package decodes from them.
"""

import json
import os
import pathlib
import random
import sys
import unicodedata

import make_tokenizers as base
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        processors, trainers)

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "src/data"))
from unicode_tables import charsmap  # noqa: E402

LOW_LINE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>"]
WORDS = "  a b  c "

NFC, PREPEND, REPLACE = normalizers.NFC, normalizers.Prepend, normalizers.Replace
SPLIT, METASPACE, SEQUENCE = pre_tokenizers.Split, pre_tokenizers.Metaspace, pre_tokenizers.Sequence
SPACES_TO_LINES = REPLACE(" ", LOW_LINE)


def added(tokenizer):
    tokenizer.add_special_tokens(["<|im_start|>", AddedToken("<longer>", rstrip=True)])
    tokenizer.add_tokens([
        AddedToken("<left>", lstrip=True, normalized=False), AddedToken("<right>", rstrip=True),
        AddedToken("<both>", lstrip=True, rstrip=True, normalized=False), AddedToken("<word>", single_word=True),
        AddedToken("<normal>", normalized=True), AddedToken("\u00e9<\u00e9>", normalized=True),
        AddedToken("\n\n", normalized=False), AddedToken("[[a]]", normalized=False)])


def with_template(tokenizer, before, after=()):
    pattern = " ".join([*before, "$A", *after])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=pattern, pair=pattern + " $B",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*before, *after}])


def finished(tokenizer, before=("<s>",), after=()):
    added(tokenizer)
    with_template(tokenizer, before, after)
    return tokenizer


def sentence_piece_decoder(strip=True):
    steps = [decoders.Replace(LOW_LINE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(steps + ([decoders.Strip(content=" ", left=1, right=0)] if strip else []))


def bpe(lines, normalizer=None, pre_tokenizer=None, decoder=None, bytes_too=True, vocabulary=1500, **model):
    """BPE of characters, whose words are those of Metaspace while it is trained."""
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": bytes_too, **model}
    learner = Tokenizer(models.BPE(unk_token="<unk>"))
    learner.pre_tokenizer = METASPACE()
    learner.train_from_iterator(lines, trainers.BpeTrainer(
        vocab_size=vocabulary, show_progress=False, limit_alphabet=300,
        special_tokens=SPECIAL + (BYTES if bytes_too else [])))
    learned = json.loads(learner.to_str())["model"]
    merges = [tuple(pair) for pair in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=learned["vocab"], merges=merges, **options))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder or sentence_piece_decoder()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def unigram(lines, pre_tokenizer, normalizer=None, decoder=None, byte_fallback=False, special=True):
    learner = Tokenizer(models.Unigram())
    learner.pre_tokenizer = METASPACE()
    european = ("".join(c for c in line if ord(c) < 0x180) for line in lines)
    learner.train_from_iterator(european, trainers.UnigramTrainer(
        vocab_size=900, show_progress=False, unk_token="<unk>",
        special_tokens=SPECIAL + (BYTES if byte_fallback else [])))
    learned = json.loads(learner.to_str())["model"]
    pieces = [tuple(pair) for pair in learned["vocab"]]
    tokenizer = Tokenizer(models.Unigram(pieces, learned["unk_id"], byte_fallback))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder or METASPACE_DECODER
    if special:
        tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


METASPACE_DECODER = decoders.Metaspace()


def byte_level(lines, pre_tokenizer, normalizer=None, begin=None, **model):
    tokenizer = base.trained(lines, SEQUENCE([*pre_tokenizer, base.byte_level(
        add_prefix_space=False, use_regex=len(pre_tokenizer) == 1 and isinstance(
            pre_tokenizer[0], pre_tokenizers.Digits))]), normalizer, vocabulary=1500, **model)
    if begin:
        with_template(tokenizer, [begin])
    return tokenizer


def isolated(pattern):
    return SPLIT(Regex(pattern), "isolated", invert=False)


def families(lines):
    begin = "<|begin_of_text|>"
    sentence_piece = normalizers.Sequence([PREPEND(LOW_LINE), SPACES_TO_LINES])
    yield "llama2", finished(bpe(lines, sentence_piece))
    yield "mistral", finished(bpe(lines, None, METASPACE(prepend_scheme="first", split=False)))
    yield "gemma3", finished(bpe(lines, SPACES_TO_LINES, SPLIT(" ", "merged_with_previous"),
                                 sentence_piece_decoder(strip=False)))
    phi3 = bpe(lines, sentence_piece)
    phi3.add_special_tokens([AddedToken(token, rstrip=True) for token in ("<|end|>", "<|user|>", "</s>")])
    yield "phi3", finished(phi3, before=())
    yield "llama3", byte_level(lines, [isolated(base.LLAMA3)], begin=begin, ignore_merges=True)
    yield "qwen3", byte_level(lines, [isolated(base.QWEN2)], NFC())
    yield "smollm", byte_level(lines, [pre_tokenizers.Digits(individual_digits=True)])
    yield "smollm3", byte_level(lines, [isolated(base.LLAMA3)], ignore_merges=True)
    yield "olmo2", byte_level(lines, [isolated(base.LLAMA3)], begin="<|endoftext|>")
    yield "deepseek", byte_level(lines, [isolated(r"\p{N}{1,3}"), isolated("[\u4e00-\u9fa5\u3040-\u309f]+"),
                                         isolated(base.CASED)])
    yield "t5", finished(unigram(lines, METASPACE(), normalizers.Sequence([
        REPLACE(Regex(r"[\n\r\t]"), " "), normalizers.Strip(left=False, right=True),
        REPLACE(Regex(" {2,}"), LOW_LINE)])), before=(), after=["</s>"])


def sentence_piece_map():
    """In small what SentencePiece's nmt_nfkc has: characters, controls that go, and composed letters."""
    pairs = {chr(c): "" if c not in b"\t\n\r" else " " for c in [*range(1, 32), 127]}
    pairs.update({c: " " for c in "\u200b\u200e\u200f\ufeff"})
    for c in map(chr, [*range(0xA0, 0x2200, 3), *range(0xAC00, 0xAE00, 7), *range(0xFB00, 0x10000, 5), 0x1D400]):
        if normalizers.NFKC().normalize_str(c) != c:
            pairs[c] = normalizers.NFKC().normalize_str(c)
    for letter in "aeiouAEIOU":
        for mark in "\u0300\u0301\u0308":
            pairs[letter + mark] = unicodedata.normalize("NFC", letter + mark)
    return charsmap(sorted((text.encode(), value) for text, value in pairs.items()))


def clusters(rng):
    """Texts of characters that join others, most of them in short clusters."""
    some = [0x0D, 0x0A, 0x09, 0x300, 0x301, 0x308, 0x200D, 0xA9, 0xAE, 0x203C, 0x1F1E6, 0x1F1E7, 0x1100,
            0x1161, 0x11A8, 0xAC00, 0xAC01, 0x915, 0x94D, 0x937, 0x93C, 0x600, 0x903, 0x1F600, 0xFE0F,
            0x61, 0x65, 0x41, 0x20, 0x200B, 0xD4E, 0xE0001, 0x1F3FB, 0xE33, 0xA0, 0x132]
    ranges = [range(1, 0x3000), range(1, 0x800), range(0xE000, 0x20000)]
    return ["".join(chr(rng.choice(some) if rng.random() < 0.75 else rng.choice(rng.choice(ranges)))
                    for _ in range(rng.randrange(1, 9))).encode() for _ in range(2000)]


def constructs(lines):
    """What the families have in common, in other combinations."""
    yield "unknown", finished(bpe(lines, pre_tokenizer=METASPACE(prepend_scheme="never"), bytes_too=False,
                                  fuse_unk=False), after=["</s>"])
    yield "fused", finished(bpe(lines, NFC(), METASPACE(), bytes_too=False, decoder=METASPACE_DECODER))
    yield "no_unknown", finished(bpe(lines, normalizers.Strip(), METASPACE(split=False), bytes_too=False,
                                     unk_token=None, decoder=decoders.Fuse()))
    crossing = bpe(lines, SPACES_TO_LINES)
    content = json.loads(crossing.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary.update({"a" + LOW_LINE: len(vocabulary) + 50, "e" + LOW_LINE: len(vocabulary) + 51})
    content["model"]["merges"][:0] = [["a", LOW_LINE], ["e", LOW_LINE]]
    yield "crossing", finished(Tokenizer.from_str(json.dumps(content)))
    some = content["model"]["vocab"] = {t: i for t, i in vocabulary.items() if t not in ("<0xC3>", "<0xE2>")}
    assert len(some) == len(vocabulary) - 2
    content["model"]["ignore_merges"] = True
    yield "whole", finished(Tokenizer.from_str(json.dumps(content)))
    yield "unigram_bytes", finished(unigram(
        lines, METASPACE(prepend_scheme="first"), byte_fallback=True,
        decoder=decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])))
    yield "unigram_whole", finished(unigram(lines, None, sentence_or_nothing(), decoder=sentence_piece_decoder()))
    spelled = decoders.Sequence([decoders.Replace(Regex("[aeiou]+"), "_"), decoders.Strip("_", 0, 1),
                                 decoders.Strip("_", 2, 0)])
    yield "whitespace", finished(bpe(lines, pre_tokenizer=pre_tokenizers.Whitespace(), decoder=spelled))
    content["model"]["ignore_merges"] = True
    content["model"]["merges"] = content["model"]["merges"][2:]
    content["model"]["vocab"][WORDS.replace(" ", LOW_LINE)] = 3000
    yield "whole_text", finished(Tokenizer.from_str(json.dumps(content)))
    yield "digits", finished(unigram(lines, pre_tokenizers.Digits(individual_digits=True)))
    yield "unigram_spelled", finished(unigram(lines, METASPACE(), byte_fallback=True, special=False))
    scores = Tokenizer(models.Unigram([("<unk>", 0.0), ("ab", -30.0), ("b", 5.0), ("c", -1.0), ("<s>", 0.0)], 0))
    scores.decoder = decoders.Fuse()
    yield "scores", finished(scores)
    yield "split_spaces", finished(bpe(lines, pre_tokenizer=SEQUENCE([
        pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=False),
        METASPACE(prepend_scheme="first")])))
    yield "lowercase", finished(bpe(lines, normalizers.Lowercase(), pre_tokenizers.Punctuation()))
    yield "nfkc", finished(bpe(
        lines, normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), SPACES_TO_LINES]),
        pre_tokenizers.Punctuation("merged_with_previous")))
    yield "precompiled", finished(unigram(lines, METASPACE(), normalizers.Sequence([
        normalizers.Precompiled(sentence_piece_map()), REPLACE(Regex(" {2,}"), " ")])))
    yield "precompiled_words", finished(unigram(
        lines, SEQUENCE([pre_tokenizers.WhitespaceSplit(), METASPACE()]),
        normalizers.Precompiled(sentence_piece_map()), byte_fallback=True))
    for behavior in ("removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"):
        for invert in (False, True):
            pattern = Regex(r"[aeiou\s]") if behavior != "isolated" else "ab"
            yield f"{behavior}_{invert}", finished(bpe(
                lines, pre_tokenizer=SPLIT(pattern, behavior, invert), ignore_merges=True))


def sentence_or_nothing():
    return normalizers.Sequence([PREPEND(LOW_LINE), REPLACE(" ", LOW_LINE), REPLACE(Regex("[xyz]+"), "")])


def record(tokenizer, folder, texts, rng):
    os.makedirs(folder, exist_ok=True)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    cases = [base.case_of(tokenizer, text) for text in texts]
    size = max(tokenizer.get_vocab().values()) + 1
    known = [token for token in range(size) if tokenizer.id_to_token(token) is not None]
    decodes = []
    for _ in range(150):
        ids = rng.choices(known, k=rng.randrange(1, 12))
        if rng.random() < 0.5:
            ids += rng.choices(known[:259], k=rng.randrange(1, 5))
        decodes.append({"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=False),
                        "shown": tokenizer.decode(ids)})
    with open(os.path.join(folder, "strings.json"), "w", encoding="utf-8") as out:
        json.dump(cases, out)
    with open(os.path.join(folder, "decodes.json"), "w", encoding="utf-8") as out:
        json.dump(decodes, out)


def folded_characters():
    """Texts with all characters that Lowercase, NFKC or Punctuation know, in front of others."""
    texts = []
    for first in [*range(0x40, 0xD800, 64), *range(0xF900, 0x20000, 64)]:
        block = "".join(map(chr, range(first, first + 64)))
        known = [normalizers.NFKC().normalize_str(block), normalizers.Lowercase().normalize_str(block),
                 "".join(text for text, _ in pre_tokenizers.Punctuation("removed").pre_tokenize_str(block))]
        if any(text != block for text in known):
            texts.append("a".join(block).encode() + block.encode())
    return texts


def main(folder):
    rng = random.Random(11)
    lexicon = base.words(rng, 400)
    lines = base.text(rng, lexicon, 60_000).decode("utf-8", "replace").split("\n")
    texts = [text for text in base.strings(rng, lexicon) if len(text) < 4000]
    texts = [*texts[:len(texts) - 350], *texts[-40:], *(base.text(rng, lexicon, 3000) for _ in range(3))]
    texts += [each.encode() for each in (
        WORDS, "ab c<unk>ab", f"{LOW_LINE}a {LOW_LINE}", "a\U00011de1\U00011de2\U00016ff5\U00016ff6b7\u00bd8")]
    for name, tokenizer in [*families(lines), *constructs(lines)]:
        more = folded_characters() if name in ("lowercase", "nfkc") else []
        if name.startswith("precompiled"):
            more = clusters(rng)
        record(tokenizer, os.path.join(folder, name), texts + more, rng)


if __name__ == "__main__":
    main(sys.argv[1])
