"""Runs the cases that are not in the results file yet, each with a limit of time and memory, and writes docs/coverage.md.

    python -m model_coverage.run --only=layers/ --only=keras_hub/Bert --resume

A process runs a few layers or models; where it ends, fails or breaks a limit, another takes the rest. One runs at a time.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from absl import flags

from model_coverage import application_cases, case as one_case, hub_cases, layer_cases, page

HERE = Path(__file__).parent
GROUPS = {"layers": layer_cases, "keras_hub": hub_cases, "applications": application_cases}
CHILD = "import json, sys; from model_coverage.case import main; main(*json.loads(sys.argv[1]))"
TOGETHER = {"layers": 12, "keras_hub": 6, "applications": 1}

FLAGS = flags.FlagValues()  # its own, because tests import this file beside other programs
flags.DEFINE_multi_string(
    "only", [], "Cases whose name starts with this, or matches it with *; all by default.", flag_values=FLAGS
)
flags.DEFINE_bool("resume", False, "Leave out cases that have a result for every mesh.", flag_values=FLAGS)
flags.DEFINE_multi_string("mesh", list(one_case.MESHES), "Meshes.", flag_values=FLAGS)
flags.DEFINE_enum(
    "layouts",
    "default",
    ["default", "columns"],
    "Layouts that the strategy finds, or every matrix split by columns.",
    flag_values=FLAGS,
)
flags.DEFINE_integer("seconds", 900, "Limit of one case, all its meshes together.", flag_values=FLAGS)
flags.DEFINE_integer("gigabytes", 16, "Limit of one process.", flag_values=FLAGS)
flags.DEFINE_string("results", str(HERE / "results.json"), "Where results are kept.", flag_values=FLAGS)
flags.DEFINE_string("page", str(HERE.parent.parent / "docs" / "coverage.md"), "The page that is written.", flag_values=FLAGS)


def names() -> list[str]:
    """Every case there is, found by looking into Keras and KerasHub."""
    return [f"{group}/{name}" for group, cases in GROUPS.items() for name in cases.names()]


def case_of(name: str) -> one_case.Case:
    """The case with a name such as layers/Dense."""
    group, _, member = name.partition("/")
    return GROUPS[group].case(member)


def wanted(name: str, patterns: list[str]) -> bool:
    """Whether a case is meant by --only."""
    return not patterns or any(name.startswith(pattern) or fnmatch.fnmatch(name, pattern) for pattern in patterns)


def memory(pid: int) -> float:
    """Resident memory of a process in GiB."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


def run(todo: list[str], meshes: list[str], keep) -> list[str]:
    """Runs cases in one process until it ends or breaks a limit; returns what is left to do."""
    command = [sys.executable, "-c", CHILD, json.dumps([todo, meshes, FLAGS.layouts])]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment, cwd=HERE.parent.parent, **pipes)
    lines: queue.Queue = queue.Queue()
    errors: list[str] = []
    threading.Thread(target=lambda: [*map(lines.put, process.stdout), lines.put(None)], daemon=True).start()
    threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True).start()
    left, done, started, cause, peak, line = list(todo), [], time.time(), None, 0.0, ""
    too_large = f"needs more than {FLAGS.gigabytes} GiB"
    while line is not None:
        try:
            line = lines.get(timeout=0.3)
        except queue.Empty:
            line = ""
        if line and line.startswith('{"case"'):
            result = json.loads(line)
            if "mesh" not in result:
                left, done, started = left[left.index(result["case"]) :], [], time.time()
            else:
                done.append(result["mesh"])
                keep(result | {"gigabytes": round(peak, 1)})
        peak = max(peak, memory(process.pid))
        if cause is None and peak > FLAGS.gigabytes:
            cause = too_large
        if cause is None and time.time() - started > FLAGS.seconds:
            cause = f"takes longer than {FLAGS.seconds} s"
        if cause:
            process.kill()
    missing = [mesh for mesh in meshes if mesh not in done]
    crowded = cause == too_large and (done or len(left) < len(todo))  # what came before may have left it in memory
    if process.wait() == 0 or crowded:  # to the end, to an error, or to be run alone
        return run(left[:1], missing, keep) + left[1:] if missing else left[1:]
    lost = [line for line in errors if "Check failed" in line or "Error" in line or "F0000" in line]
    cause = cause or f"the process ended with {process.returncode}: {(lost or errors or [''])[-1].strip()[:250]}"
    if missing:
        keep({"case": left[0], "mesh": missing[0], "ok": False, "cause": cause, "gigabytes": round(peak, 1)})
        if missing[1:] and "longer" not in cause:
            run(left[:1], missing[1:], keep)
        else:
            for mesh in missing[1:]:
                keep({"case": left[0], "mesh": mesh, "ok": False, "cause": cause})
    return left[1:]


def main(_) -> None:
    """Runs what is wanted and writes the page after every process."""
    path = Path(FLAGS.results)
    results = json.loads(path.read_text()) if path.exists() else {}

    def keep(result: dict) -> None:
        result = result | {"date": time.strftime("%Y-%m-%d")}
        name, mesh = result.pop("case"), result.pop("mesh")
        print(result.pop("trace", ""), end="", file=sys.stderr)  # it has paths of this machine, so it is not kept
        results.setdefault(name, {})[mesh] = result
        said = f"{result['error']:.1e}" if "error" in result else result.get("cause", "")
        print(f"{name:45} {mesh:15} {'-' if result['ok'] is None else 'ok' if result['ok'] else 'FAIL':5}{said}", flush=True)
        path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")

    every = names()
    versions = {name: importlib.metadata.version(name) for name in ("tensorflow", "keras", "keras-hub")}
    todo = [name for name in every if wanted(name, FLAGS.only)]
    if FLAGS.resume:
        todo = [name for name in todo if not set(FLAGS.mesh) <= set(results.get(name, {}))]
    while todo:
        group = todo[0].partition("/")[0]
        some = [name for name in todo if name.startswith(group)][: TOGETHER[group]]
        left = run(some, FLAGS.mesh, keep)
        todo = left + [name for name in todo if name not in some]
        Path(FLAGS.page).write_text(page.page(every, results, versions))


if __name__ == "__main__":
    main(FLAGS(sys.argv))
