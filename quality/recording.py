"""Recordings: q, k, v of real self-attention calls, a bounded sample that is always the same, to fit policies to.

`record` runs a pipeline as it is and keeps, of some (layer, step, guidance branch, head), all keys and values and
evenly spaced query rows, in BF16. docs/calibration.md has the format. Prompts with an even index are the fit half,
the others the held-out half; both halves are sampled at the same places.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from wanfp4.errors import OutputError, SettingsError, Wanfp4Error
from wanfp4.kernels import reference
from wanfp4.kernels.dispatch import HEAD_DIM
from wanfp4.processors.model_info import ModelInfo
from wanfp4.processors.patch import Patch, patch
from wanfp4.processors.pipelines import Settings, generate_latents, info_of, shifted
from wanfp4.processors.session import Call
from wanfp4.quality.aggregate import Json
from wanfp4.quality.files import output_folder, replacing, write
from wanfp4.quality.jobs import attention_of, essence, header, log_above_bar, quiet, said_once, weights_digest
from wanfp4.quality.plan import DEFAULT_SEEDS, Plan, check_call, make_plan
from wanfp4.quality.record import watching
from wanfp4.quality.report import json_text
from wanfp4.quality.results import Result, listing, read_result
from wanfp4.quality.shadow import spaced

log = logging.getLogger("wanfp4")

RECORDING = Result("recording", "recording.json", "wanfp4 recording", 1, (), "`wanfp4 calibrate record`")
KIND, SCHEMA, MANIFEST = RECORDING.kind, RECORDING.schema, RECORDING.file
FIT, HELD_OUT = "fit", "held-out"

ROWS = 64
CALLS = 48
LIMIT_MB = 256

# What a call's names and metadata take in its file, at most.
_OVERHEAD = 2048
# What must agree for a recording to go on, which says once of all its runs what they were made with: words for the
# message, by key.
_SAME = {
    "model": "model",
    "attention": "attention of the pipeline's own",
    "scheduler": "scheduler",
    "settings": "settings",
    "prompts": "prompts",
    "seeds": "seeds",
    "call": "arguments of the pipeline's call",
    "rows": "--rows",
    "calls": "--calls",
    "limit_mb": "--limit",
    "machine": "machine",
    "versions": "versions",
}


class Pick(NamedTuple):
    """A place of a run to record: `branch` is 0 for cond, 1 for uncond; layer, step and head count from 0."""

    layer: int
    step: int
    branch: int
    head: int


_BRANCHES = ("cond", "uncond")


@dataclass(frozen=True)
class Recorded:
    """A recorded call of one head.

    prompt        index of the prompt; `seed` of the noise.
    expert, layer, num_layers, step, sigma, branch, head  where and when; counted from 0.
    tokens        self-attention length.
    rows          which of them q holds.
    largest       the largest |logit| of the sample that a guard looks at, which is of all heads.
    q, k, v       [rows, 128], [tokens, 128], [tokens, 128], BF16.
    """

    prompt: int
    seed: int
    expert: str
    layer: int
    num_layers: int
    step: int
    sigma: float
    branch: str
    head: int
    tokens: int
    rows: tuple[int, ...]
    largest: float
    q: Tensor = field(repr=False)
    k: Tensor = field(repr=False)
    v: Tensor = field(repr=False)


class Recording:
    """A folder of recorded calls; `data` is its recording.json."""

    def __init__(self, folder: Path, data: Json) -> None:
        self.folder = folder
        self.data = data

    @property
    def complete(self) -> bool:
        """False while runs are missing."""
        return bool(self.data["complete"])

    def runs(self, half: str) -> list[Json]:
        """The runs of a half that are there, unfinished ones included."""
        return [run for run in self.data["runs"] if half_of(run["prompt"]) == half]

    def calls(self, half: str) -> list[Recorded]:
        """The calls of a half, `FIT` or `HELD_OUT`. Raises Wanfp4Error for files that are missing or not as written."""
        return [call for run in self.runs(half) for call in self._calls(run)]

    def _calls(self, run: Json) -> list[Recorded]:
        path = self.folder / run["file"]
        try:
            with safe_open(path, "pt") as file:
                said = file.metadata() or {}
                if said.get("weights") != self.data["model"]["weights"]:
                    raise Wanfp4Error(f"{path} is of other weights than {MANIFEST}: record into an empty folder")
                return [
                    Recorded(
                        **{**call, "rows": tuple(call["rows"]), "largest": float(call["largest"])},
                        **{name: file.get_tensor(f"{i}.{name}") for name in "qkv"},
                    )
                    for i, call in enumerate(json.loads(said["calls"]))
                ]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise Wanfp4Error(f"cannot read the recorded run {str(path)!r}: {error}") from None


def half_of(prompt: int) -> str:
    """The half that a prompt's index belongs to."""
    return HELD_OUT if prompt % 2 else FIT


def load_recording(folder: str | Path) -> Recording:
    """The recording in a folder. Raises SettingsError when there is none, or one of another schema."""
    file = listing(folder, RECORDING)
    return Recording(file.parent, read_result(file, RECORDING))


def picks(layers: int, steps: int, branches: int, heads: int) -> list[Pick]:
    """Every place of a run, in the order in which they are recorded until the room is full.

    Layers take turns, in an order drawn once; each layer's places come in an order drawn for it. The draw is seeded, so
    it is always the same.
    """
    generator = random.Random(0)
    order = generator.sample(range(layers), layers)
    every = [(s, b, h) for s in range(steps) for b in range(branches) for h in range(heads)]
    decks = {layer: generator.sample(every, len(every)) for layer in order}
    return [Pick(layer, *decks[layer][i]) for i in range(len(every)) for layer in order]


def record(
    pipe: Any,
    prompts: Sequence[str],
    seeds: Sequence[int] | int = DEFAULT_SEEDS,
    steps: int | None = None,
    *,
    folder: str | Path,
    settings: Settings | None = None,
    rows: int = ROWS,
    calls: int = CALLS,
    limit_mb: int = LIMIT_MB,
    force: bool = False,
    progress: bool = True,
    model: str | None = None,
    command: str | None = None,
    **call: Any,
) -> Recording:
    """Record attention inputs of `pipe`, an unpatched diffusers text-to-video pipeline, into `folder`.

    prompts   two or more: those with an even index are for fitting, the others are held out.
    seeds, steps, settings, progress, model, command, call  as `wanfp4.drift`.
    rows      query rows of each recorded call, evenly spaced.
    calls     calls recorded of each run, fewer where `limit_mb` megabytes (10^6 bytes, of all runs together) are full.
    force     start anew where the folder holds a recording of something else.

    Goes on after the finished runs of the same recording. Ctrl-C keeps what is there, the unfinished run's calls
    included; a resumed recording makes that run again. Time: one run for each prompt and seed. Memory: the recorded
    calls of one run.

    Raises SettingsError, ModelError, OutputError before the first step.
    """
    info = info_of(pipe)
    plan = make_plan(info, ["bf16"], prompts, seeds, steps, settings=settings)
    check_call(pipe, call)
    attention = attention_of(pipe, info)
    chosen = plan_picks(info, plan, rows, calls, limit_mb)
    known = header(KIND, SCHEMA, pipe, info, plan, None, False, call, model, command)
    known["model"]["weights"] = weights_digest(pipe)
    data = {**known, "attention": attention, "rows": rows, "calls": calls, "limit_mb": limit_mb, "runs": []}
    del data["backend"], data["strict"], data["steps"]
    with output_folder(folder) as place:
        found = _resumed(place, json.loads(json.dumps(data)), force)
        if not found.complete:
            with patch(pipe, "bf16") as handle:
                _record_all(pipe, plan, found, handle, chosen, call, progress)
    return found


def plan_picks(info: ModelInfo, plan: Plan, rows: int, calls: int, limit_mb: int) -> dict[tuple[int, int], list[Pick]]:
    """What each run, (prompt index, seed), records. Raises SettingsError when nothing fits, or a half has no prompt."""
    for name, value in (("rows", rows), ("calls", calls), ("limit_mb", limit_mb)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SettingsError(f"{name} must be a whole number from 1, not {value!r}")
    if len(plan.prompts) < 2:
        raise SettingsError(
            "at least two prompts are needed, one to fit and one to hold out; four of each, or two and two seeds, "
            "show a spread"
        )
    runs = len(plan.prompts) * len(plan.seeds)
    tokens = info.tokens(plan.settings)
    size = (min(rows, tokens) + 2 * tokens) * HEAD_DIM * 2 + _OVERHEAD
    each = min(calls, limit_mb * 10**6 // (size * runs))
    if not each:
        raise SettingsError(
            f"a call of {tokens} tokens takes {size / 1e6:.1f} MB, and {runs} runs need one each: raise the limit of "
            f"{limit_mb} MB to {math.ceil(size * runs / 1e6)} MB, or take fewer prompts or seeds"
        )
    expert = info.experts[0]
    order = picks(expert.layers, plan.settings.steps, 2 if plan.settings.guidance > 1 else 1, expert.heads)
    each = min(each, len(order))
    chosen: dict[tuple[int, int], list[Pick]] = {}
    for half in (FIT, HELD_OUT):
        # Both halves start at the same place, so that they differ by their prompts alone.
        mine = [(p, seed) for p in range(len(plan.prompts)) if half_of(p) == half for seed in plan.seeds]
        for i, run in enumerate(mine):
            chosen[run] = [order[(i * each + j) % len(order)] for j in range(each)]
    return chosen


def _resumed(folder: Path, data: Json, force: bool) -> Recording:
    """The recording to fill: the folder's own with its finished runs, or a new one."""
    if not (folder / MANIFEST).exists():
        return Recording(folder, data)
    if force:
        with contextlib.suppress(Wanfp4Error):
            for run in load_recording(folder).data["runs"]:
                _remove(folder / Path(run["file"]).name)
        _remove(folder / MANIFEST)
        return Recording(folder, data)
    before = load_recording(folder)
    wrong = [words for key, words in _SAME.items() if essence(key, before.data.get(key)) != essence(key, data[key])]
    if wrong:
        raise SettingsError(
            f"{str(folder)!r} holds a recording of other {', '.join(wrong)}; give the same to go on with it, choose "
            "another folder, or add --force"
        )
    whole = [run for run in before.data["runs"] if run["complete"] and (folder / run["file"]).is_file()]
    before.data.update(runs=whole, complete=len(whole) == len(data["prompts"]) * len(data["seeds"]))
    return before


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot remove {str(path)!r}: {error.strerror or error}") from error


def _record_all(
    pipe: Any,
    plan: Plan,
    found: Recording,
    handle: Patch,
    chosen: Mapping[tuple[int, int], Sequence[Pick]],
    call: Mapping[str, Any],
    progress: bool,
) -> None:
    finished = {(run["prompt"], run["seed"]) for run in found.data["runs"]}
    todo = [(p, s) for p in range(len(plan.prompts)) for s in plan.seeds if (p, s) not in finished]
    if finished:
        log.info("%d of %d runs are recorded already", len(finished), len(finished) + len(todo))
    with (
        shifted(pipe, plan.settings.shift),
        quiet(pipe),
        said_once(),
        tqdm(total=len(todo) * plan.settings.steps, unit="step", disable=not progress, dynamic_ncols=True) as bar,
        log_above_bar(),
    ):
        for p, seed in todo:
            bar.set_description(f"prompt {p + 1}, seed {seed}")
            run = _Run(p, seed, chosen[p, seed], found.data["rows"])
            with _kept(run, found), handle.observing(run.observe), watching(pipe, lambda _: _tick(bar)):
                generate_latents(pipe, plan.prompts[p], plan.settings, seed, **call)
    found.data["complete"] = True
    write(found.folder / MANIFEST, json_text(found.data))


def _tick(bar: Any) -> None:
    bar.update()


@contextlib.contextmanager
def _kept(run: _Run, found: Recording) -> Iterator[None]:
    """Write the run's calls when the block ends, however it ends."""
    done = False
    try:
        yield
        done = True
    finally:
        if run.taken or done:
            run.write(found, done)
            if not done:
                log.warning("stopped early: what has been recorded is in %s; the same command goes on", found.folder)


class _Run:
    """One denoising run as it goes on."""

    def __init__(self, prompt: int, seed: int, chosen: Sequence[Pick], rows: int) -> None:
        self.prompt, self.seed, self.rows = prompt, seed, rows
        self.heads: dict[tuple[int, int, str], list[int]] = {}
        for pick in chosen:
            self.heads.setdefault((pick.layer, pick.step, _BRANCHES[pick.branch]), []).append(pick.head)
        self.taken: list[Recorded] = []

    @torch.no_grad()
    def observe(self, call: Call) -> None:
        if call.site.blocks != "blocks" or call.step is None or call.sigma is None:
            return
        heads = self.heads.get((call.site.layer, call.step, call.branch), [])
        if not heads:
            return
        tokens = call.q.shape[1]
        rows = spaced(self.rows, tokens)
        index = torch.tensor(rows, device=call.q.device)
        with torch.autocast(call.q.device.type, enabled=False):
            largest = reference.sampled_logit(call.q, call.k, 1 / math.sqrt(call.q.shape[-1]))
        for head in sorted(heads):
            q, k, v = (
                t.to("cpu", torch.bfloat16, copy=True).contiguous()
                for t in (call.q[0, index, head], call.k[0, :, head], call.v[0, :, head])
            )
            where = (call.expert, call.site.layer, call.site.num_layers, call.step, call.sigma, call.branch, head)
            self.taken.append(Recorded(self.prompt, self.seed, *where, tokens, tuple(rows), largest, q, k, v))

    def write(self, found: Recording, complete: bool) -> None:
        """The run's file, then the manifest that names it."""
        name = f"prompt-{self.prompt}-seed-{self.seed}.safetensors"
        tensors = {f"{i}.{n}": getattr(call, n) for i, call in enumerate(self.taken) for n in "qkv"}
        plain = [{k: v for k, v in vars(call).items() if k not in ("q", "k", "v")} for call in self.taken]
        said = {"kind": KIND, "schema": str(SCHEMA), "weights": found.data["model"]["weights"]}
        with replacing(found.folder / name) as temporary:
            save_file(tensors, temporary, {**said, "calls": json.dumps(plain)})
        entry = {"prompt": self.prompt, "seed": self.seed, "half": half_of(self.prompt), "file": name}
        size = (found.folder / name).stat().st_size
        found.data["runs"] = sorted(
            [run for run in found.data["runs"] if run["file"] != name]
            + [{**entry, "calls": len(self.taken), "bytes": size, "complete": complete}],
            key=lambda run: (run["prompt"], run["seed"]),
        )
        write(found.folder / MANIFEST, json_text(found.data))
