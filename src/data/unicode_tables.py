"""Writes unicode_tables.cpp and nfc_tables.cpp: what a tokenizer must know of Unicode.

    python3 unicode_tables.py FOLDER

The tables are asked from the `tokenizers` package, character by character, and not taken from a file
of the Unicode consortium: our ids must be those of the package, so its Unicode version is the one
that counts. Run it again when a new version of the package knows new characters.
"""

import sys
import unicodedata

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

CATEGORIES = ("Cn Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So "
              "Zs Zl Zp Cc Cf Co").split()
CODES = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def members(pattern):
    """All characters that a pattern for one character matches."""
    split = pre_tokenizers.Split(Regex(pattern), "removed")
    found = []
    for at in range(0, len(CODES), 4096):
        block = CODES[at:at + 4096]
        kept = set("".join(text for text, _ in split.pre_tokenize_str("".join(map(chr, block)))))
        found += [c for c in block if chr(c) not in kept]
    return found


def lines(items, width=100):
    """The items, with commas, filled into lines."""
    out, line = [], "   "
    for item in items:
        if len(line) + len(item) + 2 > width:
            out.append(line)
            line = "   "
        line += " " + item + ","
    return "\n".join(out + [line])


def head(what):
    return (f"// {what}\n// Written by unicode_tables.py from tokenizers {tokenizers.__version__};"
            " not to be edited.\n")


def categories():
    kind = ["Cn"] * 0x110000
    for name in CATEGORIES[1:]:
        for c in members("\\p{%s}" % name):
            kind[c] = name
    runs = [(0, kind[0])]
    for c in CODES[1:]:
        if kind[c] != runs[-1][1]:
            runs.append((c, kind[c]))
    return (head("General categories of all characters, as runs: first character * 32 + category.")
            + '#include "data/unicode.h"\n\nnamespace fsdp::data {\n\n// clang-format off\n'
            + "const uint32_t kCategoryRuns[] = {\n"
            + lines("0x%x" % (c * 32 + CATEGORIES.index(name)) for c, name in runs)
            + "\n};\n// clang-format on\nconst int kCategoryRunCount = sizeof(kCategoryRuns) / "
            "sizeof(kCategoryRuns[0]);\n\n}  // namespace fsdp::data\n")


def combining_classes(nfd):
    """Canonical combining classes other than 0: marks are ordered by them in a decomposition."""
    known = {}
    for c in range(0x300, 0x20D1):
        known.setdefault(unicodedata.combining(chr(c)), chr(c))
    del known[0]

    def swaps(a, b):
        return nfd("x" + a + b) == "x" + b + a

    low, high = known[min(known)], known[max(known)]
    classes = {}
    for c in members(r"\p{M}"):
        mark = chr(c)
        value = unicodedata.combining(mark)
        if value == 0 and unicodedata.category(mark) == "Cn" and nfd(mark) == mark:  # newer than Python
            if swaps(high, mark) or swaps(mark, low):
                value = next(k for k, m in known.items() if not swaps(m, mark) and not swaps(mark, m))
        if value:
            classes[c] = value
    return classes


def normal_forms():
    nfd = normalizers.NFD().normalize_str
    nfc = normalizers.NFC().normalize_str
    classes = combining_classes(nfd)
    runs = []
    for c, value in sorted(classes.items()):
        if runs and runs[-1][1] == c - 1 and runs[-1][2] == value:
            runs[-1][1] = c
        else:
            runs.append([c, c, value])

    plain = [c for c in CODES if not 0xAC00 <= c < 0xD7A4]  # Hangul is computed
    forms = {c: parts for c in plain if (parts := nfd(chr(c))) != chr(c)}
    whole = {parts: c for c, parts in reversed(forms.items())}
    pairs = []
    for c, parts in forms.items():
        if len(parts) == 1:
            pairs.append((c, ord(parts), 0, 0))
            continue
        first = ord(parts[0]) if len(parts) == 2 else whole[parts[:-1]]
        pairs.append((c, first, ord(parts[-1]), int(nfc(parts) == chr(c))))
    excluded = ["0x%x" % c for c, _, second, composes in pairs if second and not composes]
    return (head("What normalisation form C must know. Hangul syllables are computed instead.")
            + '#include "data/nfc.h"\n\nnamespace fsdp::data {\n\n// clang-format off\n'
            + "const CombiningRun kCombiningRuns[] = {  // first, last, class\n"
            + lines("{0x%x,0x%x,%d}" % tuple(run) for run in runs)
            + "\n};\nconst char32_t kPairs[][3] = {  // a character, its two parts\n"
            + lines("{0x%x,0x%x,0x%x}" % pair[:3] for pair in pairs if pair[2])
            + "\n};\nconst char32_t kSingles[][2] = {  // a character, the one it stands for\n"
            + lines("{0x%x,0x%x}" % pair[:2] for pair in pairs if not pair[2])
            + "\n};\nconst char32_t kNeverComposed[] = {\n" + lines(excluded)
            + "\n};\n// clang-format on\n"
            "const int kCombiningRunCount = sizeof(kCombiningRuns) / sizeof(kCombiningRuns[0]);\n"
            "const int kPairCount = sizeof(kPairs) / sizeof(kPairs[0]);\n"
            "const int kSingleCount = sizeof(kSingles) / sizeof(kSingles[0]);\n"
            "const int kNeverComposedCount = sizeof(kNeverComposed) / sizeof(kNeverComposed[0]);\n\n"
            "}  // namespace fsdp::data\n")


if __name__ == "__main__":
    for name, text in (("unicode_tables", categories()), ("nfc_tables", normal_forms())):
        with open(f"{sys.argv[1]}/{name}.cpp", "w", encoding="utf-8") as out:
            out.write(text)
