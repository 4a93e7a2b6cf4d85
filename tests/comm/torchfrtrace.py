#!/usr/bin/env python3
"""torchfrtrace.py LIBTORCH ARGUMENTS...: PyTorch's own torchfrtrace on ARGUMENTS.

It is Python only and lies in the wheel that LibTorch is taken from, so torch itself, which may need
libraries that aren't here, isn't loaded. Without it there, torch must be importable; exits with 77 if
it isn't.
"""
import pathlib
import sys
import types


def main(libtorch, arguments):
    folder = pathlib.Path(libtorch)
    if (folder / "distributed/flight_recorder/fr_trace.py").exists():
        for name in ("torch", "torch.distributed"):
            package = types.ModuleType(name)
            package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = package
    try:
        from torch.distributed.flight_recorder import fr_trace
    except ImportError as problem:
        print(problem, file=sys.stderr)
        return 77
    fr_trace.main(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
