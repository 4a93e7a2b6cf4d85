#!/usr/bin/env python3
"""tools_test.py SOURCE_DIR BUILD_DIR: the scripts of tools/ do what they say.

compile-commands lists every source of the library with a command of its own; check-alone names a
file that misses an include; build-cost's launcher passes on exit codes and notes the time.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

failures = 0


def fact(holds, sentence, shown=""):
    global failures
    print(f"{'ok' if holds else 'NOT'}: {sentence}")
    if not holds:
        failures += 1
        print(shown)


def run(*command):
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)


def main(source, build):
    tools = source / "tools"
    listed = run(tools / "compile-commands", build, "-")
    entries = json.loads(listed.stdout or "[]")
    files = {entry["file"] for entry in entries}
    rooms = ("shard", "comm", "checkpoint", "train", "cli", "bench", "launch")
    missing = [str(path) for room in rooms for path in (source / "src" / room).glob("*.cpp")
               if str(path) not in files]
    fact(listed.returncode == 0 and not missing, "compile-commands lists every source", missing)
    wrong = [e["file"] for e in entries if f"-c {e['file']}" not in e["command"]]
    fact(not wrong, "each with a command that compiles it", wrong[:5])
    result = run(tools / "compile-commands", "/nonexistent", "-")
    fact(result.returncode == 2 and "HINT" in result.stderr, "a wrong folder is refused", result)

    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log")
        result = run(tools / "build-cost", "--launch", log, "sh", "-c", "exit 3")
        noted = json.loads(log.read_text())
        fact(result.returncode == 3, "build-cost's launcher passes on the exit code", result)
        fact(noted["seconds"] >= 0 and noted["command"][0] == "sh", "and notes the time", noted)

        script = pathlib.Path(folder, "tools/check-alone")  # which takes the tree around it
        script.parent.mkdir()
        shutil.copy(tools / "check-alone", script)
        os.environ["XDG_CACHE_HOME"] = folder
        sources = pathlib.Path(folder, "src")
        sources.mkdir()
        (sources / "a.cpp").write_text("#include <string>\nstd::string a;\n")
        (sources / "b.cpp").write_text("std::string b;\n")  # fine after a.cpp
        pathlib.Path(folder, "build").mkdir()
        pathlib.Path(folder, "build/build.ninja").touch()
        listing = [{"directory": folder, "file": str(sources / name),
                    "command": f"c++ -o x/Unity/unity_0.o -c {sources / name}"}
                   for name in ("a.cpp", "b.cpp")]
        pathlib.Path(folder, "tools/compile-commands").write_text(f"print({json.dumps(listing)!r})")
        result = run(script, pathlib.Path(folder, "build"))
        fact(result.returncode == 1 and "b.cpp doesn't compile" in result.stdout
             and "a.cpp doesn't" not in result.stdout, "check-alone names what misses an include", result)
        (sources / "b.cpp").write_text("#include <string>\nstd::string b;\n")
        result = run(script, pathlib.Path(folder, "build"))
        fact(result.returncode == 0 and "1 known, 1 compile alone" in result.stdout,
             "it compiles only what has changed", result)
    return 1 if failures else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: tools_test.py SOURCE_DIR BUILD_DIR")
    sys.exit(main(*(pathlib.Path(path).resolve() for path in sys.argv[1:])))
