"""Charts of the model's inside: maps of embeddings, the norms of their two parts, and similarity of patients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from manydg.report._drawing import COLOURS, FAINT, INK, MARKERS, QUIET, WIDTH, Panel, canvas, look, to_svg
from manydg.report._words import number

_MOST_NAMED = 8
_SHORT, _LONG = 12, 22
SIDES = {"train": "Training patients", "val": "Validation patients", "test": "Unseen patients"}
PANEL_NAMES = {
    "v": "Features v",
    "parallel": "Part of v along z",
    "orthogonal": "Part of v across z",
    "z": "Patient factor z",
}


def embedding_maps(data: Mapping[str, Any]) -> list[Panel]:
    """Each map twice: coloured by label, then by patient (the eight with most samples, the rest grey)."""
    labels, patients = np.asarray(data["labels"]), np.asarray(data["patients"])
    panels = []
    for part in data["panels"]:
        points = np.asarray(part["xy"], float)
        name = PANEL_NAMES.get(part["name"], part["name"])
        for what, codes, names, probe in (
            ("label", labels, data["label_names"], part.get("label_accuracy")),
            ("patient", patients, data["pseudonyms"], part.get("patient_accuracy")),
        ):
            panels.append(_map(f"{name}, by {what}", points, codes, names, what, probe))
    return panels


def _map(
    title: str, points: npt.NDArray[np.float64], codes: npt.NDArray[Any], names: Sequence[str], what: str, probe: Any
) -> Panel:
    common = np.argsort(-np.bincount(codes, minlength=len(names)), kind="stable")[:_MOST_NAMED]
    with canvas(WIDTH, 3.9) as (figure, axes):
        rest = ~np.isin(codes, common)
        if rest.any():
            axes.scatter(
                points[rest, 0], points[rest, 1], s=5, color=FAINT, marker="o", lw=0, label="others", rasterized=True
            )
        for place, code in enumerate(sorted(common)):
            mine = codes == code
            if mine.any():
                axes.scatter(
                    points[mine, 0], points[mine, 1], s=9, color=COLOURS[place], marker=MARKERS[place], lw=0, alpha=0.6,
                    label=_short(str(names[code])), rasterized=True,
                )  # fmt: skip
        axes.set(xticks=[], yticks=[])
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(True)
            spine.set_color(FAINT)
        columns = 3 if max(len(str(names[code])) for code in common) <= _SHORT else 2
        figure.legend(loc="outside lower center", ncols=columns, handletextpad=0.1, columnspacing=0.9, markerscale=1.6)
        svg = to_svg(figure)
    share = _explained(points, codes)
    words = f"{len(points):,} samples. The {what} explains {share:.0%} of the spread of the points."
    if probe is not None:
        words += f" A linear model names the {what} from it with accuracy {number(probe)}."
    return Panel(svg, title, words)


def _short(name: str) -> str:
    return name if len(name) <= _LONG else name[: _LONG - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _explained(points: npt.NDArray[np.float64], codes: npt.NDArray[Any]) -> float:
    """Share of the points' variance that lies between groups."""
    counts = np.maximum(np.bincount(codes), 1)
    means = np.stack([np.bincount(codes, weights=points[:, axis]) / counts for axis in (0, 1)], axis=1)
    total = float(((points - points.mean(axis=0)) ** 2).sum())
    within = float(((points - means[codes]) ** 2).sum())
    return 1.0 - within / total if total > 0 else 0.0


def norms_scatter(data: Mapping[str, Any]) -> list[Panel]:
    """Norm of the part along z against the norm of the part at right angles, one panel per split."""
    splits = [(split["name"], _finite_pairs(split)) for split in data["splits"]]
    top = max((float(pairs.max()) for _, pairs in splits if len(pairs)), default=1.0) * 1.05
    return [_norms(name, pairs, top, place) for place, (name, pairs) in enumerate(splits) if len(pairs)]


def _finite_pairs(split: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    pairs = np.column_stack([np.asarray(split[key], float) for key in ("parallel", "orthogonal")])
    kept: npt.NDArray[np.float64] = pairs[np.isfinite(pairs).all(axis=1)]
    return kept


def _norms(name: str, pairs: npt.NDArray[np.float64], top: float, place: int) -> Panel:
    style = look(place)
    with canvas(WIDTH, 3.7) as (figure, axes):
        axes.plot([0, top], [0, top], color=QUIET, lw=1.0, ls=(0, (1, 2)))
        axes.scatter(
            pairs[:, 0], pairs[:, 1], s=6, color=style.colour, marker=style.marker, alpha=0.35, lw=0, rasterized=True
        )
        axes.set(xlim=(0, top), ylim=(0, top), xlabel="norm of the part along z", ylabel="norm of the part across z")
        svg = to_svg(figure)
    medians = np.median(pairs, axis=0)
    larger = float((pairs[:, 0] > pairs[:, 1]).mean())
    related = (
        float(np.corrcoef(pairs[:, 0], pairs[:, 1]).ravel()[1])
        if len(pairs) > 2 and pairs.std(axis=0).min() > 0
        else float("nan")
    )
    words = (
        f"{len(pairs):,} samples. Median norm {number(medians[0], 2)} along z and {number(medians[1], 2)} across it; "
        f"the part along z is the larger in {larger:.0%} of samples; correlation of the two {number(related, 2)}."
    )
    return Panel(svg, SIDES.get(name, name), words)


def similarity_dots(rows: Sequence[Mapping[str, Any]]) -> Panel:
    """Mean cosine of z within and across patients, a pair of dots per row."""
    with canvas(WIDTH, 1.25 + 0.5 * len(rows)) as (figure, axes):
        for place, row in enumerate(rows):
            axes.plot([row["within"], row["across"]], [place, place], color=FAINT, lw=3, zorder=1)
            _dot(axes, row, "within", place, 0)
            _dot(axes, row, "across", place, 1)
        axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel="mean cosine of z for two samples")
        axes.set_yticks(range(len(rows)), [str(row["name"]) for row in rows])
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.15)
        axes.ticklabel_format(axis="x", useOffset=False)
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles[:2], names[:2], loc="outside lower center", ncols=2)
        svg = to_svg(figure)
    words = " ".join(
        f"{row['name']}: {number(row['within'], 4)} within a patient, {number(row['across'], 4)} across patients."
        for row in rows
    )
    return Panel(svg, "Similarity of z within and across patients", words)


def _dot(axes: Axes, row: Mapping[str, Any], key: str, place: int, style: int) -> None:
    drawn = look(style)
    name = {"within": "same patient", "across": "different patients"}[key]
    bounds = row.get(f"{key}_interval")
    if bounds and None not in bounds:
        axes.plot(bounds, [place, place], color=INK, lw=1, zorder=2)
    axes.plot(row[key], place, color=drawn.colour, marker=drawn.marker, ms=8, ls="", label=name, zorder=3)
