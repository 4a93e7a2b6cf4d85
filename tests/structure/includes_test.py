#!/usr/bin/env python3
"""includes_test.py SOURCE_DIR [--self-test]: checks the code against docs/architecture.md.

Reads the table of rooms there and checks every #include in src/ and include/: a room includes only
what its row allows and no closed header of another, public headers include nothing from src/, and
rooms without LibTorch's libraries stay without them. State of the process or of a thread is only in
the files that the document lists. Files are opened by base/regular_file.h. It also checks how files
begin, and how long files and functions are. Prints FILE:LINE and a sentence for each violation and exits with 1. --self-test plants
violations in a copy and expects to find each.
"""
import pathlib
import re
import shutil
import sys
import tempfile

LONGEST = {"src": 500, "include": 500, "tests": 600, "examples": 500}  # lines of a file
LONGEST_FUNCTION = 60  # lines, in src and include
TABLES_OF_DATA = {"src/data/folding_tables.cpp", "src/data/nfc_tables.cpp"}  # may be longer
HEADERS = {".h", ".hpp", ".cuh"}
SOURCES = HEADERS | {".cpp", ".cc", ".cu"}
PUBLIC = "include/fsdp"
INCLUDE = re.compile(r'\s*#\s*include\s*([<"])([^>"]+)[>"]')

# A variable that outlives a call: thread_local, static in a function, or at the beginning of a line.
NOT_STATE = ("const|constexpr|using|return|typedef|extern|class|struct|enum|template|friend|namespace|"
             "union|public|private")
STATE = re.compile(
    r"\s*(inline\s+)?(static\s+)?thread_local\b|"
    r"\s+static\s+(?!const\b|constexpr\b|inline\b|thread_local\b)[^()=;]*?[\w>*&]\s+\w+(\s*=|\{|;)|"
    rf"(?!.*\b({NOT_STATE})\b)[A-Za-z_][\w:<>,&* ]*\s\w+(\s*=[^;]*|\{{[^;]*\}})?;(\s*//.*)?$")
# What opens a file. base/regular_file.h opens those that are read, and place_of_file of it looks at
# what stands where one is written.
OPENS = re.compile(r"std::([io]?fstream)\b|\bf?(re)?open\(.*\"[rwa]|\bO_(RDONLY|WRONLY|RDWR)\b")
READS = re.compile(r"std::i?fstream\b|open\(.*\"r|\bO_RDONLY\b")
PLACE = "place_of_file("
OPENERS = {  # that need neither
    "src/base/regular_file.cpp",  # does it
    "src/base/subprocess.cpp", "src/launch/launcher.cpp", "src/launch/processes.cpp",  # /dev/null
    "src/comm/shm/mapping.cpp",  # another rank's memory
    "src/disk/file.cpp", "src/observe/tensorboard.cpp", "src/comm/core/flight_file.cpp",  # only new files
}

RAW_TEXT = re.compile(r'R"(\w*)\(.*?\)\1"', re.S)
TYPE = re.compile(r"(namespace|class|struct|enum|union|extern \"C\")\b")

# Words of the last column that aren't rooms, and the headers they stand for. The first pattern that
# matches a header decides.
OUTSIDE = [
    ("MPI", re.compile(r"mpi\.h$")),
    ("CUDA", re.compile(r"(ATen|c10)/cuda/|cuda|cu[a-z]+\.h$|nccl|.*/ProcessGroupNCCL")),
    ("LibTorch headers", re.compile(r"c10/|torch/headeronly/")),
    ("LibTorch", re.compile(r"ATen/|torch/|caffe2/")),
]
IMPLIED = {"LibTorch": {"LibTorch headers"}}


class Room:
    def __init__(self, folder, allowed, planned, line):
        self.folder = folder    # "src/comm/core"
        self.allowed = allowed  # {"base", "LibTorch headers"}
        self.planned = planned
        self.line = line        # in the document

    @property
    def name(self):
        return self.folder.removeprefix("src/")


def read_rooms(document):
    """The rows of the first table whose columns are: room, what lives there, may use."""
    rooms, inside = {}, False
    for number, line in enumerate(document.read_text().splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells == ["room", "what lives there", "may use"]:
            inside = True
        elif inside and not line.startswith("|"):
            break
        elif inside and len(cells) == 3 and not cells[0].startswith("-"):
            folder = re.search(r"`([^`]+)`", cells[0])
            allowed = set(re.findall(r"`([^`]+)`", cells[2]))
            if folder and (allowed or cells[2] == "nobody"):
                for word in list(allowed):
                    allowed |= IMPLIED.get(word, set())
                room = Room(folder[1], allowed, "*planned*" in cells[0], number)
                rooms[room.name] = room
    return rooms


def read_column(document, title):
    """The names in the first column of the table where that column has this title."""
    names, inside = set(), False
    for line in document.read_text().splitlines():
        first = line.strip().strip("|").split("|")[0].strip()
        if first == title:
            inside = True
        elif inside and not line.startswith("|"):
            break
        elif inside and first.startswith("`"):
            names.add(first.strip("`"))
    return names


def functions(lines):
    """(line, length) of each function that isn't inside another; for code by clang-format."""
    i = 0
    while i < len(lines):
        if not lines[i].endswith("{") or lines[i].lstrip().startswith(("//", "#")):
            i += 1
            continue
        start = i
        while start > 0:
            before = lines[start - 1].strip()
            ends = not before or before.endswith((";", "{", "}")) or before.startswith(("//", "#"))
            if ends or before in ("public:", "private:", "protected:"):
                break
            start -= 1
        head = re.sub(r"^template <.*?> (?=\S)", "", " ".join(lines[start:i + 1]).strip())
        if TYPE.match(head) or "(" not in head or " = " in head.split("(")[0]:
            i += 1
            continue
        indent = len(lines[start]) - len(lines[start].lstrip())
        end = i + 1
        while end < len(lines) and not lines[end].startswith(" " * indent + "}"):
            end += 1
        yield start + 1, end - start + 1
        i = end + 1


class Check:
    def __init__(self, root):
        self.root = root
        self.document = root / "docs/architecture.md"
        self.rooms = read_rooms(self.document)
        self.closed = read_column(self.document, "closed header")
        self.with_state = read_column(self.document, "process-wide state")
        self.violations = []
        self.needs_libtorch = {}  # public header: bool

    def report(self, path, line, sentence):
        self.violations.append(f"{path.relative_to(self.root)}:{line}: {sentence}")

    def run(self):
        if len(self.rooms) < 2:
            self.report(self.document, 1, "has no table: room, what lives there, may use.")
            return self.violations
        self.check_table()
        for path in self.files("src", "include"):
            self.check_includes(path)
            self.check_state(path)
            self.check_opened(path)
            self.check_functions(path)
        for path in self.files("src", "include", "tests", "examples"):
            self.check_shape(path)
        return self.violations

    def files(self, *folders):
        for folder in folders:
            for path in sorted((self.root / folder).rglob("*")):
                if path.suffix in SOURCES and path.is_file():
                    yield path

    # --- the table itself ---

    def check_table(self):
        known = set(self.rooms) | {word for word, _ in OUTSIDE} | {"everything"}
        for room in self.rooms.values():
            for word in sorted(room.allowed - known):
                self.report_row(room, f"may use {word}, which isn't a room.")
            there = any(p.suffix in SOURCES for p in (self.root / room.folder).rglob("*"))
            if there and room.planned:
                self.report_row(room, "is marked planned but exists.")
            if not there and not room.planned:
                self.report_row(room, "has no source file.")
        for header in sorted(self.closed):
            if not (self.root / "src" / header).exists():
                self.report(self.document, 1, f"closes {header}, which doesn't exist.")
        for name in sorted(self.with_state):
            if not (self.root / "src" / name).exists():
                self.report(self.document, 1, f"lists the state of {name}, which doesn't exist.")
        self.check_one_way()

    def report_row(self, room, sentence):
        self.report(self.document, room.line, f"{room.folder} {sentence}")

    def check_one_way(self):
        """No room may use itself, directly or through others."""
        def uses(name):
            return [word for word in sorted(self.rooms[name].allowed) if word in self.rooms]

        for start in self.rooms:
            seen, waiting = set(), uses(start)
            while waiting:
                name = waiting.pop()
                if name == start:
                    self.report_row(self.rooms[start], "reaches itself through what it may use.")
                    break
                if name not in seen:
                    seen.add(name)
                    waiting += uses(name)

    # --- includes ---

    def room_of(self, path):
        """The innermost room of a path under src/, or None."""
        parts = path.split("/")[:-1]
        while parts:
            if "/".join(parts) in self.rooms:
                return self.rooms["/".join(parts)]
            parts.pop()
        return None

    def includes(self, path):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = INCLUDE.match(line)
            if match:
                yield number, match[1] == '"', match[2]

    def public_needs_libtorch(self, name):  # "fsdp/world.h"
        if name not in self.needs_libtorch:
            self.needs_libtorch[name] = False  # ends a cycle of headers
            path = self.root / "include" / name
            self.needs_libtorch[name] = path.exists() and any(
                inner.startswith("fsdp/") and self.public_needs_libtorch(inner)
                or any(pattern.match(inner) for _, pattern in OUTSIDE)
                for _, _, inner in self.includes(path))
        return self.needs_libtorch[name]

    def check_includes(self, path):
        inside = str(path.relative_to(self.root))
        public = inside.startswith("include/")
        room = self.rooms.get(PUBLIC) if public else self.room_of(inside.removeprefix("src/"))
        if room is None:
            self.report(path, 1, "is in a folder that has no row in docs/architecture.md.")
            return
        for line, quoted, name in self.includes(path):
            sentence = self.judge(room, public, quoted, name)
            if sentence:
                self.report(path, line, sentence)

    def judge(self, room, public, quoted, name):
        """What is wrong with `#include "name"` in this room, or None."""
        free = "everything" in room.allowed
        if name.startswith("fsdp/"):
            if not (self.root / "include" / name).exists():
                return f"there is no public header {name}."
            if not free and "LibTorch" not in room.allowed and self.public_needs_libtorch(name):
                return f"{name} needs LibTorch, but {room.folder} must not use its libraries."
            return None
        other = self.room_of(name)
        if quoted or other:
            if public:
                return f"a public header includes {name}, which users don't have."
            if other is None or not (self.root / "src" / name).exists():
                return f"{name} isn't a file of any room; write the path from src/ or include/."
            if name in self.closed and other is not room:
                return f"{name} is closed: only {other.folder} includes it."
            if free or other is room or other.name in room.allowed:
                return None
            return f"{room.folder} may not use {other.folder} ({name})."
        for word, pattern in OUTSIDE:
            if pattern.match(name):
                allowed = free or word in room.allowed
                return None if allowed else f"{room.folder} may not use {word} ({name})."
        return None

    # --- what a file holds ---

    def check_state(self, path):
        if str(path.relative_to(self.root)).removeprefix("src/") in self.with_state:
            return
        text = RAW_TEXT.sub(lambda raw: re.sub(r"[^\n]", "x", raw[0]), path.read_text())
        for number, line in enumerate(text.splitlines(), 1):
            if STATE.match(line):
                self.report(path, number, "is state of the process or of a thread; give it an owner, "
                                          "or list the file in docs/architecture.md.")

    def check_opened(self, path):
        if str(path.relative_to(self.root)) in OPENERS:
            return
        text = path.read_text()
        for number, line in enumerate(text.splitlines(), 1):
            code = line.split("//")[0]
            if "O_DIRECTORY" in code:  # refuses what isn't one
                continue
            placed = PLACE in (text if "O_" in code else code)
            if OPENS.search(code) and (READS.search(code) or not placed):
                self.report(path, number, "opens a file, which may be a FIFO; use base/regular_file.h.")

    def check_functions(self, path):
        for line, length in functions(path.read_text().splitlines()):
            if length > LONGEST_FUNCTION:
                self.report(path, line, f"is a function of {length} lines, more than "
                                        f"{LONGEST_FUNCTION}; split it.")

    # --- file shape ---

    def check_shape(self, path):
        lines = path.read_text().splitlines()
        first = lines[0] if lines else ""
        if path.suffix in HEADERS and not first.startswith(("//", "/*")):
            self.report(path, 1, "a header must begin with a comment that says what it is.")
        elif not first.startswith(("//", "/*", "#include")):
            self.report(path, 1, "a source file must begin with a comment or an include.")
        name = str(path.relative_to(self.root))
        most = LONGEST[name.split("/")[0]]
        if len(lines) > most and name not in TABLES_OF_DATA:
            self.report(path, len(lines), f"has {len(lines)} lines, more than {most}; split it.")


# --- the test of the test ---

# An include, planted as line 2 of a file, and the violation that must be reported.
PLANTED = [
    ("src/base/log.h", '"comm/store.h"', "src/base may not use src/comm ("),
    ("src/base/log.h", "<comm/store.h>", "src/base may not use src/comm ("),
    ("src/base/log.h", "<c10/core/Device.h>", "src/base may not use LibTorch headers"),
    ("src/launch/guard.cpp", '"cli/commands.h"', "src/launch may not use src/cli"),
    ("src/comm/store.h", '"comm/nccl/nccl_backend.h"', "src/comm may not use src/comm/nccl"),
    ("src/comm/core/queue.h", '"comm/shm/group.h"', "src/comm/core may not use src/comm/shm"),
    ("src/comm/core/queue.h", "<torch/csrc/Types.h>", "src/comm/core may not use LibTorch ("),
    ("src/comm/shm/group.h", "<ATen/ATen.h>", "src/comm/shm may not use LibTorch ("),
    ("src/comm/shm/group.h", '"fsdp/world.h"', "fsdp/world.h needs LibTorch"),
    ("src/optim/clip.cpp", '"shard/engine.h"', "shard/engine.h is closed: only src/shard"),
    ("src/cli/main.cpp", '"shard/gatherer.h"', "shard/gatherer.h is closed: only src/shard"),
    ("src/comm/world.cpp", "<mpi.h>", "src/comm may not use MPI"),
    ("src/comm/world.cpp", "<ATen/cuda/CUDAEvent.h>", "src/comm may not use CUDA"),
    ("src/comm/world.cpp", '"store.h"', "store.h isn't a file"),
    ("include/fsdp/mesh.h", '"base/log.h"', "a public header includes base/log.h"),
    ("include/fsdp/mesh.h", "<base/log.h>", "a public header includes base/log.h"),
]


def planted(root):
    """(file, its text with a violation, the violation that must be found)."""
    for name, header, sentence in PLANTED:
        text = f"// Planted.\n#include {header}\n" + (root / name).read_text()
        yield name, text, f"{name}:2: {sentence}"
    long = LONGEST["src"] + 1
    yield "src/base/log.h", "#pragma once\n", "src/base/log.h:1: a header must begin with a comment"
    yield "src/base/log.cpp", "\nint x;\n", "src/base/log.cpp:1: a source file must begin"
    yield "src/base/log.cpp", "// Long.\n" * long, f"src/base/log.cpp:{long}: has {long} lines"
    yield "src/attic/old.cpp", "// Old.\n", "src/attic/old.cpp:1: is in a folder"
    state = "is state of the process"
    for line in ("thread_local int x = 0;", "std::atomic<int> x{0};", "  static std::map<int, int> x;",
                 "  static auto* x = new int;", "bool x;"):
        yield "src/comm/store.cpp", f"// State.\n{line}\n", f"src/comm/store.cpp:2: {state}"
    for line in ("std::ifstream in(path);", "std::ofstream out(path);", "f = std::fopen(path, \"rb\");",
                 "f = ::open(path, O_RDONLY);", "f = ::open(path, O_WRONLY | O_CREAT, 0666);"):
        yield "src/comm/store.cpp", f"// Opens.\n  {line}\n", "src/comm/store.cpp:2: opens a file"
    body = "  f();\n" * (LONGEST_FUNCTION - 1)
    for head in ("void f() {", "A::A(int x)\n    : x_(x),\n      y_(x) {", "template <typename T>\nT f() {"):
        yield ("src/comm/store.cpp", f"// Long.\n{head}\n{body}}}\n",
               "src/comm/store.cpp:2: is a function of")
    document = "docs/architecture.md"
    rows = (root / document).read_text().splitlines(keepends=True)
    base = next(i for i, row in enumerate(rows) if row.startswith("| `src/base` "))

    def with_base(row):
        return "".join(rows[:base] + [row + "\n"] + rows[base + 1:])

    yield document, with_base("| `src/attic` | old | nobody |"), "src/attic has no source file"
    yield document, with_base("| `src/base` *planned* | b | nobody |"), "marked planned but exists"
    yield document, with_base("| `src/base` | b | `comm` |"), "src/base reaches itself"
    yield document, with_base("| `src/base` | b | `attic` |"), "may use attic, which isn't a room"
    yield document, "# Nothing\n", f"{document}:1: has no table"


def self_test(root):
    failures = 0
    known = set(Check(root).run())
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for part in ("src", "include", "docs"):
            shutil.copytree(root / part, copy / part)
        for name, text, expected in planted(root):
            file = copy / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
            found = [line for line in Check(copy).run() if line not in known]
            if not any(expected in line for line in found):
                failures += 1
                print(f"planted in {name}, not found: {expected}\n  found: {found}")
            if (root / name).exists():
                shutil.copy(root / name, file)
            else:
                shutil.rmtree(file.parent)
    return failures


def main(arguments):
    folders = [argument for argument in arguments if not argument.startswith("-")]
    if len(folders) != 1 or set(arguments) - set(folders) - {"--self-test"}:
        print("usage: includes_test.py SOURCE_DIR [--self-test]", file=sys.stderr)
        return 2
    root = pathlib.Path(folders[0]).resolve()
    if "--self-test" in arguments:
        return 1 if self_test(root) else 0
    violations = Check(root).run()
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
