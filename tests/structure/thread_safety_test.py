#!/usr/bin/env python3
"""thread_safety_test.py SOURCE_DIR BUILD_DIR [--self-test]: the rules of src/base/mutex.h hold.

Every mutex in src is a Mutex, and something is FSDP_GUARDED_BY it. Clang's thread-safety analysis
finds no access to guarded data, and no call of a function that FSDP_REQUIRES a mutex, without the
lock. It looks at every source that includes base/mutex.h itself or through headers of its room. The
sources of a room are compiled together, because reading LibTorch's headers takes longer than the
analysis. Include paths and definitions are those of the build; a room that isn't part of it (CUDA or
MPI is missing) is left out. src/bench is left out, too.

Prints FILE:LINE and a sentence for each violation and exits with 1; with 77 if there is no clang.
--self-test plants violations in a copy and expects to find each.
"""
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

COMPILERS = ["clang++", *(f"clang++-{version}" for version in range(20, 13, -1))]
ANALYSIS = ["-fsyntax-only", "-Wno-everything", "-Wthread-safety", "-Werror=thread-safety",
            "-ferror-limit=0", "-fno-caret-diagnostics", "-fno-color-diagnostics"]
MUTEX = "base/mutex.h"
# Where a mutex of the standard library may be: the wrapper itself, and the two recursive ones.
STANDARD = {"src/base/mutex.h", "src/shard/model.h", "src/shard/runtime.h"}
STANDARD_MUTEX = re.compile(r"std::(\w*mutex|condition_variable\w*)\b")
DECLARED = re.compile(r"^\s*(?:static |mutable )*Mutex (\w+);", re.M)
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)
LEFT_OUT = {"bench"}


def sources(root, *suffixes):
    """The files of src that this test looks at."""
    for path in sorted((root / "src").rglob("*")):
        if path.suffix in suffixes and path.relative_to(root / "src").parts[0] not in LEFT_OUT:
            yield path


# --- by text ---

def check_text(root):
    for path in sources(root, ".h", ".cpp"):
        name, text = str(path.relative_to(root)), path.read_text()
        for number, line in enumerate(text.splitlines(), 1):
            found = STANDARD_MUTEX.search(line.split("//")[0])
            if found and name not in STANDARD:
                yield f"{name}:{number}: {found[0]} isn't checked; use the types of {MUTEX}."
        for mutex in DECLARED.finditer(text):
            if not re.search(rf"GUARDED_BY\({mutex[1]}\)", text):
                line = text.count("\n", 0, mutex.start(1)) + 1
                yield f"{name}:{line}: nothing is FSDP_GUARDED_BY({mutex[1]})."


# --- by clang ---

def find_compiler():
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def uses_mutex(root, path):
    """Whether a file includes base/mutex.h, itself or through headers of its folder."""
    seen, waiting = set(), [path]
    while waiting:
        current = waiting.pop()
        for name in INCLUDE.findall(current.read_text()):
            header = root / "src" / name
            if name == MUTEX:
                return True
            if header.parent == path.parent and header not in seen and header.exists():
                seen.add(header)
                waiting.append(header)
    return False


def compiled_in(entry):
    """The folders whose sources an entry of compile_commands.json compiles."""
    file = pathlib.Path(entry["directory"], entry["file"])
    if "/Unity/unity_" in str(file):
        return {pathlib.Path(name).parent for name in INCLUDE.findall(file.read_text())}
    return {file.parent}


def flags_of(entry, home, root):
    """Include paths, definitions and the language. Clang can't read g++'s precompiled header."""
    words, flags = shlex.split(entry["command"])[1:], []
    for i, word in enumerate(words):
        if word in (f"-I{home}/src", f"-I{home}/include"):
            flags.append(word.replace(str(home), str(root)))
        elif word.startswith(("-I", "-D", "-std=")):
            flags.append(word)
        elif word == "-isystem":
            flags += [word, words[i + 1]]
    return flags


class Rooms:
    """The rooms of a tree that use a Mutex, with the flags of a build."""

    def __init__(self, root, build):
        self.root = root
        cache = (build / "CMakeCache.txt").read_text()
        home = pathlib.Path(re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cache, re.M)[1])
        self.flags = {}  # by folder, relative to src
        for entry in json.loads((build / "compile_commands.json").read_text()):
            for folder in compiled_in(entry):
                if folder.is_relative_to(home / "src"):
                    self.flags.setdefault(folder.relative_to(home / "src"),
                                          flags_of(entry, home, root))
        self.files = {}  # likewise
        for path in sources(root, ".cpp"):
            if uses_mutex(root, path):
                self.files.setdefault(path.parent.relative_to(root / "src"), []).append(path)

    def analyse(self, compiler, room):
        """(exit status, what clang says) about all files of a room."""
        together = "".join(f'#include "{path}"\n' for path in self.files[room])
        result = subprocess.run([compiler, *ANALYSIS, *self.flags[room], "-x", "c++", "-"],
                                input=together, capture_output=True, text=True)
        return result.returncode, result.stderr.replace(f"{self.root}/", "")


def analyse(root, build, compiler, only=None):
    """The violations, and lines about what was done."""
    rooms = Rooms(root, build)
    wanted = [room for room in rooms.files if only is None or str(room) in only]
    violations, done = [], []
    with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        running = {room: pool.submit(rooms.analyse, compiler, room)
                   for room in wanted if room in rooms.flags}
        for room in wanted:
            if room not in running:
                done.append(f"src/{room} isn't part of this build")
                continue
            status, said = running[room].result()
            done.append(f"src/{room}: {len(rooms.files[room])} files")
            if status != 0:
                violations.append(said.strip() or f"src/{room}: {compiler} exited with {status}.")
    return violations, done


# --- the test of the test ---

# A file, what is replaced in it, by what, and the violation that must be found.
QUEUE = "src/comm/core/queue.cpp"
PLANTED_FOR_CLANG = [
    (QUEUE, "  Lock lock(mutex_);\n  waiting_.push_back", "  waiting_.push_back",
     "variable 'waiting_' requires holding mutex 'mutex_'"),
    (QUEUE, "  Lock lock(mutex_);\n  waiting_.push_back", "  waiting_.push_back",
     "calling function 'start_thread' requires holding mutex 'mutex_'"),
    (QUEUE, "[&]() FSDP_REQUIRES(mutex_) { return !running_; }", "[&] { return !running_; }",
     "variable 'running_' requires holding mutex 'mutex_'"),
    (QUEUE, "  running_ = false;\n", "  Lock twice(mutex_);\n  running_ = false;\n",
     "acquiring mutex 'mutex_' that is already held"),
    ("src/base/modules.cpp", "  Lock lock(mutex);\n", "", "variable 'loaded' requires holding"),
]
PLANTED_AS_TEXT = [
    (QUEUE, "namespace fsdp::comm {\n", "namespace fsdp::comm {\nstd::mutex planted;\n",
     "std::mutex isn't checked"),
    (QUEUE, "namespace fsdp::comm {\n", "namespace fsdp::comm {\nMutex planted;\n",
     "nothing is FSDP_GUARDED_BY(planted)"),
]


def self_test(root, build, compiler):
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder).resolve()
        for part in ("src", "include"):
            shutil.copytree(root / part, copy / part)
        for name, old, new, expected in PLANTED_AS_TEXT + PLANTED_FOR_CLANG:
            by_clang = (name, old, new, expected) in PLANTED_FOR_CLANG
            if by_clang and not compiler:
                continue
            text = (copy / name).read_text()
            (copy / name).write_text(text.replace(old, new, 1))
            if by_clang:
                room = str(pathlib.Path(name).parent.relative_to("src"))
                found, _ = analyse(copy, build, compiler, only={room})
            else:
                found = list(check_text(copy))
            (copy / name).write_text(text)
            if old not in text or not any(name in said and expected in said for said in found):
                failures += 1
                print(f"planted in {name}, not found: {expected}\n  found: {found}")
    return failures


def main(arguments):
    folders = [argument for argument in arguments if not argument.startswith("-")]
    if len(folders) != 2 or set(arguments) - set(folders) - {"--self-test"}:
        print("usage: thread_safety_test.py SOURCE_DIR BUILD_DIR [--self-test]", file=sys.stderr)
        return 2
    root, build = (pathlib.Path(folder).resolve() for folder in folders)
    compiler = find_compiler()
    if "--self-test" in arguments:
        failed = self_test(root, build, compiler)
    else:
        violations = list(check_text(root))
        if compiler:
            found, done = analyse(root, build, compiler)
            violations += found
            print("\n".join(done))
        for violation in violations:
            print(violation)
        failed = len(violations)
    if failed:
        return 1
    if not compiler:
        print("there is no clang++")
        return 77
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
