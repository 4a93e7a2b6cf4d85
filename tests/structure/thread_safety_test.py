#!/usr/bin/env python3
"""thread_safety_test.py SOURCE_DIR BUILD_DIR [--self-test]: the rules of src/base/mutex.h hold.

Every mutex in src is a Mutex, and something is FSDP_GUARDED_BY it. src/bench is left out.
tools/check-alone runs clang's thread-safety analysis, where there is a clang.

Prints FILE:LINE and a sentence for each violation and exits with 1. --self-test plants violations in
a copy and expects this test and clang to find each; without clang it exits with 77.
"""
import json
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
            if not re.search(rf"(GUARDED_BY|REQUIRES)\({mutex[1]}\)", text):
                line = text.count("\n", 0, mutex.start(1)) + 1
                yield f"{name}:{line}: nothing is FSDP_GUARDED_BY({mutex[1]})."


# --- by clang ---

def flags_of(build, name):
    """Include paths, definitions and the language of src/NAME in a build; paths of the tree: HERE."""
    home = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", (build / "CMakeCache.txt").read_text(),
                     re.M)[1]
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = pathlib.Path(entry["directory"], entry["file"])
        if str(file) != f"{home}/{name}" and f'"{home}/{name}"' not in file.read_text():
            continue
        words, flags = shlex.split(entry["command"])[1:], []
        for i, word in enumerate(words):
            if word.startswith(("-I", "-D", "-std=")):
                flags.append(word.replace(f"-I{home}/", "-IHERE/"))
            elif word == "-isystem":
                flags += [word, words[i + 1]]
        return flags
    raise ValueError(f"{name} isn't part of {build}")


def analyse(root, build, compiler, name):
    """What clang says about a file of the tree `root`, with the flags of the build."""
    flags = [flag.replace("HERE", str(root)) for flag in flags_of(build, name)]
    result = subprocess.run([compiler, *ANALYSIS, *flags, root / name], capture_output=True, text=True)
    return [result.stderr] if result.returncode != 0 else []


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
                found = analyse(copy, build, compiler, name)
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
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if "--self-test" not in arguments:
        violations = list(check_text(root))
        for violation in violations:
            print(violation)
        return 1 if violations else 0
    if self_test(root, build, compiler):
        return 1
    return 0 if compiler else 77


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
