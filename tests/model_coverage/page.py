"""docs/coverage.md, made from the results."""

from __future__ import annotations

from collections import Counter

HEAD = """# Coverage

Which layers of `keras.layers`, backbones of KerasHub and models of `keras.applications` train on a mesh as on one device.
`make coverage` runs the cases and writes this page; `FLAGS="--only=layers/Dense"` runs some, `FLAGS=--resume` those that
have no result yet. What is in the table is found by looking into Keras and KerasHub, so a new class is a new line.

A case trains three steps of Adam on batches of 4, without dropout, on one device and on each mesh, and compares every
weight and every loss. "ok" is the largest difference, at most {double:.0e} in float64; that of a loss above 1 is relative.
Where it is larger, the number behind "noise" is the difference that one device gives with the rows of each batch reversed
and every weight changed by up to {nudge:.0e} of itself ({single_nudge:.0e} in float32), which is rounding; the mesh is
within ten times that, or ten times the largest of {nudges} such differences. Where it is above {noisy:.0e} with the rows
reversed, it is that with the rows in order: a model that draws a number per row is another one with its rows reversed.
Noise above {noisy:.0e} can hide anything and is no comparison. "2 of 6 split" counts the weights that the axis `model`
splits by the layouts that a `HybridStrategy` has when it is told none; the rest is replicated. Everything else is a line
with its cause.

A layer stands between two `Dense` layers. A backbone has the tiny sizes of
[hub_sizes.py](../tests/model_coverage/hub_sizes.py) and its task's head if it has one. A model of `keras.applications` has
the smallest images that it takes and four classes, and a learning rate of {slow:.0e} instead of {rate:.0e}: the batch norms
of four such images, one pixel in the last stages, would grow one device's own rounding to the size of a step.
{small} have that rate too, for the same reason.
{larger} have images of 64 by 64: at 32 by 32 the noise of the first two is above {noisy:.0e}.

{versions}, on logical CPU devices; GPU and TPU: not yet run. Sentences of failures are TensorFlow's or Keras' own, cut
short. "float32": the model fails in float64 on one device, or in float64 needs more memory than the machine
had, 24 GiB ({large}); "float32 inside": its layers cast to float32 on the way, for a
softmax or a norm. There the largest difference is at most {single:.0e}.
"""
TITLES = {
    "layers": "Layers of keras.layers",
    "keras_hub": "Backbones of KerasHub",
    "applications": "Models of keras.applications",
}


def state(result: dict | None) -> str:
    """One word for a result."""
    if result is None:
        return "not yet run"
    if result["ok"] is None:
        return "not compared"
    return "ok" if result["ok"] else "failed"


def cell(result: dict | None) -> str:
    """What stands in the table."""
    kind = state(result)
    if kind == "ok":
        noise = f" (noise {result['floor']:.0e})" if "floor" in result else ""
        single = "" if result["precision"] == "float64" else f"{result['precision']}, "
        return f"ok, {single}{result['error']:.0e}{noise}, {result['split']} of {result['weights']} split"
    cause = (result or {}).get("cause", "")
    cause = cause.replace("|", "\\|").replace("<", "&lt;").replace("`", "'").replace("[", "\\[")
    if kind == "failed" and result.get("floor") is not None:
        cause += f" (noise {result['floor']:.0e})"
    return f"{'**failed**' if kind == 'failed' else kind}{': ' * bool(cause)}{cause}"


def page(names: list[str], results: dict, versions: dict[str, str]) -> str:
    """The whole page: a line per class and a count per group."""
    from model_coverage.application_cases import LARGER, SINGLE
    from model_coverage.case import MESHES, NUDGE, NUDGES, SMALL_RATE, TOLERANCE, TOO_NOISY, Case
    from model_coverage.hub_cases import SMALL_STEPS

    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    numbers = {"double": TOLERANCE["float64"], "single": TOLERANCE["float32"], "slow": SMALL_RATE, "rate": Case.rate}
    numbers |= {"nudge": NUDGE["float64"], "single_nudge": NUDGE["float32"], "nudges": NUDGES, "noisy": TOO_NOISY}
    classes = {"larger": ", ".join(LARGER), "large": ", ".join(SINGLE), "small": ", ".join(SMALL_STEPS)}
    lines = [HEAD.format(versions=said, **classes, **numbers)]
    for group, title in TITLES.items():
        members = [name for name in names if name.startswith(group + "/")]
        lines += [f"## {title}", ""]
        for mesh in MESHES:
            counts = Counter(state(results.get(name, {}).get(mesh)) for name in members)
            lines.append(f"- `{mesh}`: " + ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())))
        lines += ["", f"| class | {' | '.join(f'`{mesh}`' for mesh in MESHES)} |", f"| --- |{' --- |' * len(MESHES)}"]
        for name in members:
            cells = [cell(results.get(name, {}).get(mesh)) for mesh in MESHES]
            same = len(set(cells)) == 1 and not cells[0].startswith("ok")
            cells = [cells[0], *("the same" for _ in cells[1:])] if same else cells
            lines.append(f"| {name.partition('/')[2]} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)
