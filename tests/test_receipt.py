"""Receipts fold what ran into few entries, lose no place, and read well as lines and as JSON."""

import itertools
import json
import subprocess
import sys

import pytest

from wanfp4 import policies
from wanfp4.receipt import Ledger, Ran, Receipt, Unpatched

FAST = Ran("wan-fast", "QK nvfp4-folded, …", "reference", emulated=True)
OWN = Ran("exact", "exact", "pipeline", reason="rules[0]")
FALLBACK = Ran("exact", "exact", "pipeline", reason="no backend", fallback=True)


def place(expert="transformer", blocks="blocks", layer=0, step=0, branch="cond", sigma=0.5, notes=None):
    return {
        "expert": expert,
        "blocks": blocks,
        "layer": layer,
        "step": step,
        "branch": branch,
        "sigma": sigma,
        "notes": notes or {},
    }


def receipt(ledger, **changes):
    return Receipt(policies()["wan-fast"], None, False, "WanPipeline", ledger.entries(), **changes)


def test_a_long_run_folds_into_one_entry_per_way_of_running():
    ledger = Ledger()
    for step, layer, branch in itertools.product(range(50), range(80), ("cond", "uncond")):
        ledger.add(OWN if layer == 3 else FAST, **place(layer=layer, step=step, branch=branch, sigma=1 - step / 50))
    made = receipt(ledger)
    assert made.calls == 50 * 80 * 2
    assert len(made.entries) == 2
    assert len(json.dumps(made.to_dict())) < 10_000
    fast, own = sorted(made.entries, key=lambda e: -e.calls)
    assert fast.layers == tuple(layer for layer in range(80) if layer != 3)
    assert fast.steps == own.steps == tuple(range(50))
    assert fast.calls == 79 * 50 * 2
    assert own.calls == 100
    assert fast.sigma == pytest.approx((0.02, 1.0))
    assert str(own) == "transformer layer 3, steps 0-49: the pipeline's own attention, 100 calls; rules[0]"


def test_folding_loses_no_place():
    """Whatever the pattern, entries cover exactly the places that ran, each with what ran there."""
    ledger, ran = Ledger(), {}
    for expert, layer, step, branch in itertools.product(("transformer", "transformer_2"), range(6), range(5), "ab"):
        if (layer * 7 + step * 3 + len(expert)) % 4 == 0 and branch == "b":
            continue  # a hole in the pattern
        what = (FAST, OWN, FALLBACK)[(layer + step // 2) % 3]
        ledger.add(what, **place(expert=expert, layer=layer, step=step, branch=branch, notes={"rows_shifted": step}))
        ran[expert, layer, step, branch] = what
    covered = {}
    for entry in ledger.entries():
        for cell in itertools.product((entry.expert,), entry.layers, entry.steps, entry.branches):
            assert cell not in covered
            covered[cell] = entry.ran
    assert covered == ran
    assert sum(e.calls for e in ledger.entries()) == len(ran)
    assert sum(e.notes["rows_shifted"] for e in ledger.entries()) == sum(step for _, _, step, _ in ran)


def test_several_runs_add_up_in_the_same_entry():
    ledger = Ledger()
    for sigma in (1.0, 0.9):
        ledger.add(FAST, **place(sigma=sigma, notes={"rows_shifted": 2}))
    (entry,) = ledger.entries()
    assert entry.calls == 2
    assert entry.sigma == (0.9, 1.0)
    assert entry.notes == {"rows_shifted": 4}
    assert str(entry) == "transformer layer 0, step 0: wan-fast on reference (emulated), 2 calls, 4 rows shifted"
    ledger.clear()
    assert ledger.entries() == ()


def test_guarded_calls_have_an_entry_of_their_own():
    ledger = Ledger()
    guarded = Ran("wan-fast", "QK …", "reference", emulated=True, guarded=True)
    for layer in range(4):
        ledger.add(guarded if layer == 2 else FAST, **place(layer=layer))
    lines = receipt(ledger).summary()
    assert lines == [
        "transformer layers 0-1, 3, step 0: wan-fast on reference (emulated), 3 calls",
        "transformer layer 2, step 0: wan-fast on reference (emulated), guarded, 1 call",
    ]


def test_summary_tells_fallbacks_unknown_steps_branches_and_what_was_left_alone():
    ledger = Ledger()
    ledger.add(FALLBACK, **place(step=None, sigma=None, branch=""))
    ledger.add(FAST, **place(expert="transformer_2", blocks="vace_blocks", layer=5, branch="uncond"))
    left = [Unpatched("transformer", f"blocks.{i}.attn1", "it has a processor of its own, Mine") for i in range(3)]
    made = receipt(ledger, unpatched=tuple(left))
    assert made.summary() == [
        "transformer layer 0, unknown step: FALLBACK to the pipeline's own attention, 1 call; no backend",
        "transformer_2.vace_blocks layer 5, step 0 (uncond): wan-fast on reference (emulated), 1 call",
        "transformer blocks.0.attn1 to blocks.2.attn1 (3 modules): not patched; it has a processor of its own, Mine",
    ]
    assert [entry.ran for entry in made.fallbacks] == [FALLBACK]


def test_an_empty_receipt_says_so():
    assert receipt(Ledger()).summary() == ["no self-attention has run yet"]


def test_entries_can_be_found_by_place():
    ledger = Ledger()
    ledger.add(FAST, **place(layer=1, step=2))
    ledger.add(OWN, **place(layer=1, step=3, branch="uncond"))
    made = receipt(ledger)
    assert [e.ran for e in made.at(layer=1)] == [FAST, OWN]
    assert [e.ran for e in made.at(layer=1, step=3)] == [OWN]
    assert [e.ran for e in made.at(branch="cond")] == [FAST]
    assert made.at(layer=2) == ()
    assert made.at(expert="transformer_2") == ()


def test_json_holds_policy_constants_and_every_field():
    ledger = Ledger()
    ledger.add(FAST, **place(notes={"rows_shifted": 1}))
    data = json.loads(json.dumps(receipt(ledger, unpatched=(Unpatched("transformer", "x", "why"),)).to_dict()))
    assert data["schema"] == 1
    assert data["pipeline"] == "WanPipeline"
    assert data["policy"]["numerics"]["classifier"]["A"] == 1.6
    assert data["unpatched"] == [{"expert": "transformer", "module": "x", "reason": "why"}]
    assert data["entries"] == [
        {
            "expert": "transformer",
            "blocks": "blocks",
            "layers": [0],
            "steps": [0],
            "branches": ["cond"],
            "sigma": [0.5, 0.5],
            "name": "wan-fast",
            "numerics": "QK nvfp4-folded, …",
            "backend": "reference",
            "emulated": True,
            "guarded": False,
            "reason": None,
            "fallback": False,
            "calls": 1,
            "notes": {"rows_shifted": 1},
        }
    ]


def test_receipts_need_no_torch():
    code = "import sys, wanfp4.receipt; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
