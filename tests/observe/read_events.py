"""read_events.py FOLDER: prints what TensorBoard reads from event files, as one JSON object.

Exits with 77 if TensorBoard isn't installed.
"""
import json
import sys

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError as problem:
    print(problem, file=sys.stderr)
    sys.exit(77)


def main(folder):
    events = EventAccumulator(folder, size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    scalars = {tag: [[e.step, repr(e.value)] for e in events.Scalars(tag)] for tag in tags["scalars"]}
    texts = {tag: [[e.step, e.tensor_proto.string_val[0].decode()] for e in events.Tensors(tag)]
             for tag in tags["tensors"]}
    plugins = {tag: events.SummaryMetadata(tag).plugin_data.plugin_name for tag in tags["tensors"]}
    print(json.dumps({"scalars": scalars, "texts": texts, "plugins": plugins}))


if __name__ == "__main__":
    main(sys.argv[1])
