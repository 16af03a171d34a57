"""Two drift reports against each other: what differs in how they were made, and whether their policies differ.

Runs are paired by prompt and seed, so that what a prompt or a noise does to both reports cancels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wanfp4.errors import OutputError, SettingsError
from wanfp4.quality.aggregate import Json
from wanfp4.quality.figures import Figure, figures
from wanfp4.quality.intervals import compare, interval
from wanfp4.quality.medians import median
from wanfp4.quality.report import named_files
from wanfp4.quality.results import DAMAGE, DRIFT, changed_by_hand, listing, owned, read_result, refuse_own

COMPARISON_KIND = "wanfp4 drift comparison"
COMPARISON_SCHEMA = 1

NAN = "no verdict: NaN"
FLOOR_NAN = "no verdict: the noise floor is NaN"

# What a report says of its circumstances. When one of the first differs, two reports answer different questions.
DECISIVE = ("model", "scheduler", "settings", "call")
_OTHERS = ("versions", "machine", "backend", "strict")

Pair = tuple[str, int]


def read_report(path: str | Path) -> Json:
    """The finished drift report in a folder, or of a report.json file. Raises SettingsError for anything else."""
    data = read_result(path, DRIFT)
    if not data.get("complete"):
        file = str(listing(path, DRIFT))
        raise SettingsError(f"the drift report {file!r} is unfinished; needed are finished ones: run its job again")
    return data


def check_outputs(outputs: Sequence[Path], *reports: str | Path, force: bool) -> None:
    """Raise OutputError when one of `outputs` is a file of one of the reports, which are finished: its JSON, its pages,
    its clips and strips; and, without `force`, when it is there."""
    own = {report: owned(report, DRIFT, named_files(read_result(report, DRIFT))) for report in reports if outputs}
    for output in outputs:
        for report, files in own.items():
            refuse_own(output, files, f"the report {str(report)!r}")
        if output.exists() and not force:
            raise OutputError(f"{str(output)!r} exists; choose another file, or add --force")


def compare_reports(a: str | Path, b: str | Path, pair: Sequence[str] = ()) -> Json:
    """The comparison of two finished drift reports as JSON values: docs/drift.md has its keys. Differences are B − A.

    Policies of one name are compared; those that `pair` names instead, as "NAME_IN_A=NAME_IN_B"; and, where there are
    neither, the only one of each report.

    Raises SettingsError for what is no finished drift report, for reports without a policy, or a prompt and seed, in
    common, and for a pair that they do not have.
    """
    reports = {"A": read_report(a), "B": read_report(b)}
    paths = {"A": a, "B": b}
    found: dict[str, tuple[dict[str, Json], list[Pair]]] = {}
    for name, data in reports.items():
        try:
            found[name] = ({s["name"]: s for s in data["policies"]}, [*_runs(data, data["noise_floor"])])
            _figures_of(data)
        except DAMAGE as error:
            raise changed_by_hand(paths[name], DRIFT, error) from None
    (of_a, pairs_a), (of_b, pairs_b) = found["A"], found["B"]
    has = f"{str(a)!r} has {_listed(of_a)}, {str(b)!r} has {_listed(of_b)}"
    shared = [_names(text, of_a, of_b, has) for text in pair] or [(name, name) for name in of_a if name in of_b]
    if not shared and len(of_a) == len(of_b) == 1:
        shared = list(zip(of_a, of_b, strict=True))
    if not shared:
        raise SettingsError(
            f"the reports have no policy in common: {has}; say which to compare, as --pair {next(iter(of_a))}="
            f"{next(iter(of_b))}"
        )
    pairs = [pair for pair in pairs_a if pair in pairs_b]
    if not pairs:
        raise SettingsError(
            f"the reports have no prompt and seed in common, so no run has a partner: {str(a)!r} has "
            f"{_told(reports['A'])}, {str(b)!r} has {_told(reports['B'])}"
        )
    return {
        "kind": COMPARISON_KIND,
        "schema": COMPARISON_SCHEMA,
        **{
            name: {"path": str(paths[name]), "created": data["created"], "command": data["command"]}
            for name, data in reports.items()
        },
        "circumstances": _circumstances(reports["A"], reports["B"]),
        "weights_known": all(data["model"].get("weights") is not None for data in reports.values()),
        "pairs": {
            "both": [{"prompt": prompt, "seed": seed} for prompt, seed in pairs],
            "A": len(pairs_a),
            "B": len(pairs_b),
        },
        "policies": [_policy(of_a[one], of_b[other], reports["A"], reports["B"], pairs) for one, other in shared],
        "only": {
            "A": [name for name in of_a if name not in {one for one, _ in shared}],
            "B": [name for name in of_b if name not in {other for _, other in shared}],
        },
    }


def _listed(sections: Mapping[str, Any]) -> str:
    return ", ".join(sections) or "none"


def _told(data: Json) -> str:
    seeds = ", ".join(map(str, data["seeds"]))
    return f"{', '.join(map(repr, data['prompts']))} with seeds {seeds}"


def _runs(data: Json, section: Json) -> dict[Pair, Json]:
    """A section's runs by prompt and seed. Prompts are told by their text: another report may count them otherwise."""
    return {(data["prompts"][run["prompt"]], run["seed"]): run for run in section["runs"]}


def _figures_of(data: Json) -> None:
    """Touch all that is read, so that a damaged report is told from a fault of ours."""
    str(data["created"]), data["command"]
    for section in (data["noise_floor"], *data["policies"]):
        for run in _runs(data, section).values():
            for figure in figures(len(data["steps"])):
                figure.of(run)
            _counts([run])
        dict(section["policy"]), dict(section["backend"]["calls"])
    _circumstances(data, data)


def _circumstances(a: Json, b: Json) -> list[Json]:
    """What differs in how the reports were made: name, value of A and of B (null where one has no such thing)."""
    keys = (*DECISIVE, *_OTHERS)
    one, other = ({**{k: d.get(k) for k in keys}, "attention": d["reference"]["attention"]} for d in (a, b))
    found = differences(one, other)
    return [{**f, "decisive": _decisive(f, a["model"].get("weights"), b["model"].get("weights"))} for f in found]


def _decisive(found: Json, weights_a: str | None, weights_b: str | None) -> bool:
    """Whether the figures of the two reports answer different questions."""
    what = found["what"]
    if what == "model.weights":
        return None not in (weights_a, weights_b)  # an earlier version's report has none, which is no difference
    if what == "model.model" and weights_a is not None and weights_a == weights_b:
        return False  # one model in two places
    return what.split(".")[0] in DECISIVE and not what.startswith(("model.source", "model.defaults"))


def differences(a: Any, b: Any, name: str = "") -> list[Json]:
    """Where two JSON values differ: dotted name, value of each, null where one has none."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = dict.fromkeys((*a, *b))
        return [d for k in keys for d in differences(a.get(k), b.get(k), f"{name}.{k}" if name else str(k))]
    return [] if a == b else [{"what": name, "A": a, "B": b}]


def _names(text: str, of_a: Mapping[str, Json], of_b: Mapping[str, Json], has: str) -> tuple[str, str]:
    """The policies of "A=B"; a name may hold an =, too."""
    for i, sign in enumerate(text):
        if sign == "=" and text[:i] in of_a and text[i + 1 :] in of_b:
            return text[:i], text[i + 1 :]
    raise SettingsError(f"--pair {text!r} must be a policy of A, = and a policy of B: {has}")


def _policy(a: Json, b: Json, data_a: Json, data_b: Json, pairs: Sequence[Pair]) -> Json:
    runs_a, runs_b = _runs(data_a, a), _runs(data_b, b)
    floors = [_runs(data, data["noise_floor"]) for data in (data_a, data_b)]
    steps = min(len(data_a["steps"]), len(data_b["steps"]))
    shared = [pair for pair in pairs if pair in runs_a and pair in runs_b]
    one, other = ([runs[pair] for pair in shared] for runs in (runs_a, runs_b))
    prompts = [prompt for prompt, _ in shared]
    floor_runs = [[floor[pair] for pair in shared] for floor in floors]
    return {
        "name": a["name"] if a["name"] == b["name"] else f"{a['name']} in A, {b['name']} in B",
        "names": {"A": a["name"], "B": b["name"]},
        "runs": len(shared),
        "constants": [d for d in differences(a["policy"], b["policy"]) if d["what"] not in ("name", "description")],
        "ran_on": {"A": sorted(a["backend"]["calls"]), "B": sorted(b["backend"]["calls"])},
        "figures": [_compared(figure, one, other, floor_runs, prompts) for figure in figures(steps)],
        "counts": {"A": _counts(one), "B": _counts(other)},
    }


def _compared(
    figure: Figure, a: Sequence[Json], b: Sequence[Json], floors: Sequence[Sequence[Json]], prompts: Sequence[str]
) -> Json:
    of_a, of_b = ([figure.of(run) for run in runs] for runs in (a, b))
    middle = [median(of_a), median(of_b)]
    # Of both reports' floors the larger: either may be where a figure moved. Not max(), which may pass over a NaN.
    both = [
        figure.floor(of_policy, median(map(figure.of, runs))) for of_policy, runs in zip(middle, floors, strict=True)
    ]
    floor = math.nan if any(map(math.isnan, both)) else max(both)
    # Equal figures differ by 0, two infinite ones (PSNR of equal clips) too.
    paired = [(0.0, 0.0) if x == y else (x, y) for x, y in zip(of_a, of_b, strict=True)]
    judged = compare([y for _, y in paired], [x for x, _ in paired], prompts, floor=floor)
    verdict = FLOOR_NAN if math.isnan(floor) else judged.verdict
    return {
        "key": figure.key,
        "label": figure.label,
        "A": interval(of_a, prompts).to_dict(),
        "B": interval(of_b, prompts).to_dict(),
        **judged.to_dict(),
        "verdict": NAN if math.isnan(judged.difference.median) else verdict,
    }


def _counts(runs: Sequence[Json]) -> Json:
    """Sums over runs, as in a report's summary."""
    return {
        "frames_black_new": sum(len(run["frames"]["black_new"]) for run in runs if run["frames"]),
        "latent_frames_nan": sum(len(run["latent_frames_nan"]) for run in runs),
    }
