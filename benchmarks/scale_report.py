"""Write the results of scale.py as Markdown, as JSON and as a chart, with fitted curves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_SHAPES: dict[str, Callable[[float], float]] = {
    "log2(n)": math.log2,
    "n": lambda n: n,
    "n log2(n)": lambda n: n * math.log2(n),
    "n^2": lambda n: n * n,
}


class Fit(NamedTuple):
    """``start + slope * shape(n)``, and the largest relative error of a point."""

    start: float
    slope: float
    residual: float


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Fit:
    """The line with the least squares of relative errors: small worlds count as much as large worlds."""
    weights = [1 / y if y else 0.0 for y in ys]
    uu = sum(w * w for w in weights)
    uv = sum(w * w * x for w, x in zip(weights, xs, strict=True))
    vv = sum(w * w * x * x for w, x in zip(weights, xs, strict=True))
    u = sum(weights)
    v = sum(w * x for w, x in zip(weights, xs, strict=True))
    determinant = uu * vv - uv * uv
    start, slope = (u * vv - v * uv) / determinant, (uu * v - uv * u) / determinant
    residual = max(abs(start + slope * x - y) * w for x, y, w in zip(xs, ys, weights, strict=True))
    return Fit(start, slope, residual)


def fit(points: Mapping[int, float], unit: str) -> str:
    """The curve closest to the points, as a text."""
    if max(points.values()) - min(points.values()) <= 0.05 * max(points.values()):
        return f"{number(sum(points.values()) / len(points), unit)}"
    fits = {
        name: fit_line([shape(n) for n in points], list(points.values())) for name, shape in _SHAPES.items()
    }
    name, best = min(fits.items(), key=lambda item: item[1].residual)
    sign = "-" if best.start < 0 else "+"
    return f"{number(best.slope, unit)} {name} {sign} {number(abs(best.start), unit)}, {best.residual:.0%}"


_PREFIXES = ((1.0, ""), (1e-3, "m"), (1e-6, "u"))


def number(value: float, unit: str) -> str:
    """Three digits: ``"1.23 ms"``."""
    if unit == "s":
        scale, prefix = next((pair for pair in _PREFIXES if abs(value) >= pair[0]), _PREFIXES[-1])
        return f"{_digits(value / scale)} {prefix}s"
    return f"{_digits(value)} {unit}".strip()


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---", *["--:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _unit(name: str) -> str:
    """The unit of a row: none for a count, MB for memory, else seconds."""
    if "(MB)" in name:
        return "MB"
    return "" if name.startswith(("keys", "sockets")) else "s"


def markdown(document: Mapping[str, Any]) -> str:
    """All tables, as Markdown."""
    about, worlds = document["machine"], document["worlds"]
    parts = [
        f"{about['cpu']}, {about['cores']} cores that all ranks share; torch {about['torch']}, Python "
        f"{about['python']}; {about['date'][:10]}; load {about['load at start']:.1f} before, "
        f"{document['load at end']:.1f} at the end.",
        "### Measured",
        _measured({n: world["steps"] for n, world in worlds.items()}),
        "### Counted at the store",
        _counted(worlds),
        "### Alone",
        _alone(document["alone"]),
        "### Start-up: measured, and the model of this machine",
        _validation(worlds, document["predicted"]),
        "### Start-up: the model, with a core for each rank",
        _beyond(document["predicted"]),
    ]
    return "\n\n".join(parts) + "\n"


def _measured(steps: Mapping[int, Mapping[str, float]]) -> str:
    rows = []
    for name in next(iter(steps.values())):
        points = {n: found[name] for n, found in steps.items()}
        unit = _unit(name)
        rows.append([name, *(number(value, unit) for value in points.values()), fit(points, unit)])
    return _table(["step", *(f"{n} ranks" for n in steps), "fit, worst residual"], rows)


def _counted(worlds: Mapping[int, Any]) -> str:
    names = ["connections", "keys", "requests", "requests of the busiest rank", "bytes"]
    rows = [
        [f"{variant}, {n} ranks", *(number(world["counted"][variant][name], "") for name in names)]
        for variant in next(iter(worlds.values()))["counted"]
        for n, world in worlds.items()
    ]
    return _table(["start-up", *names], rows)


def _alone(alone: Mapping[int, Mapping[str, float]]) -> str:
    rows = [[name, *(number(alone[n][name], "s") for n in alone)] for name in next(iter(alone.values()))]
    return _table(["what a rank computes", *(f"{n:,} ranks" for n in alone)], rows)


def _validation(worlds: Mapping[int, Any], predicted: Mapping[str, Any]) -> str:
    rows = []
    for variant, found in predicted.items():
        for n, world in worlds.items():
            seconds, model = world["starts"][variant]["seconds"], found["here"][n]
            counted = world["counted"][variant]
            times = [number(seconds, "s"), number(model.seconds, "s"), f"{model.seconds / seconds:.2f}"]
            traffic = [counted["requests"], model.requests, counted["bytes"], model.nbytes]
            rows.append([f"{variant}, {n} ranks", *times, *(number(count, "") for count in traffic)])
    headings = ["", "measured", "model", "model / measured", "requests", "model", "bytes", "model"]
    return _table(headings, rows)


def _beyond(predicted: Mapping[str, Any]) -> str:
    rows = []
    for variant, found in predicted.items():
        for n, model in found["beyond"].items():
            simulated = found["simulated"].get(n)
            rows.append(
                [
                    f"{variant}, {n:,} ranks",
                    number(model.requests, ""),
                    f"{model.nbytes / 1e9:,.3g} GB",
                    number(model.store_seconds, "s"),
                    number(model.seconds, "s"),
                    number(simulated.seconds, "s") if simulated else "",
                ]
            )
    headings = ["", "requests", "traffic", "the store's work", "start-up, at least", "event by event"]
    return _table(headings, rows)


def write(document: Mapping[str, Any], text: str, folder: Path) -> list[Path]:
    """Write the tables and figures to the folder ``results`` in ``folder``, and the chart to ``docs``."""
    stem = folder / "results" / f"scale-{document['machine']['tag']}"
    paths = [stem.with_suffix(".json"), stem.with_suffix(".md"), folder.parent / "docs" / "scale.png"]
    paths[0].write_text(json.dumps(document, indent=1) + "\n")
    paths[1].write_text(text)
    _chart(paths[2], document)
    return paths


def _chart(path: Path, document: Mapping[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    worlds = document["worlds"]
    for variant, found in document["predicted"].items():
        measured = [world["starts"][variant]["seconds"] for world in worlds.values()]
        (line,) = left.plot(list(worlds), measured, "o", label=f"{variant}: measured, model")
        for axes, points, style in ((left, found["here"], "-"), (right, found["beyond"], "--")):
            seconds = [prediction.seconds for prediction in points.values()]
            axes.plot(list(points), seconds, style, color=line.get_color(), label=variant)
    left.set_title(f"initialize on {document['machine']['cores']} cores: measured (dots) and modelled")
    right.set_title("initialize, modelled: a core for each rank, one store")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("ranks")
        axes.set_ylabel("seconds")
    right.legend()
    figure.savefig(path, dpi=100)
