"""Which opcodes there are, and who translates them.

    @op("add .sat? .s32|u32|s64|u64", "sub .s32|u32")
    def _(b, ins, …): …

A pattern is an opcode in parts: alternatives by "|", "?" for a part that may be missing. The handler gets the parts
that were a choice, in order, "" for a missing one. An opcode that no pattern matches is an error, so no modifier passes
unseen: a pattern has to name it. Where one changes nothing here (a cache hint, `.ftz` where nothing is subnormal), its
handler says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wanfp4.simulator import arity
from wanfp4.simulator.findings import UnknownInstruction
from wanfp4.simulator.ptx import Instruction

if TYPE_CHECKING:
    from wanfp4.simulator.translate import Block

Handler = Callable[..., None]


@dataclass(frozen=True)
class Rule:
    """targets: how many operands, from the first, are written. uses: whether all others must be defined values.

    effects: it reaches beyond registers, so the machine has to know the line.
    """

    pattern: str
    regex: re.Pattern[str]
    handler: Handler
    targets: int
    uses: bool
    effects: bool


RULES: dict[str, list[Rule]] = {}


def op(*patterns: str, targets: int = 1, uses: bool = True, effects: bool = False) -> Callable[[Handler], Handler]:
    """Registers a handler for opcodes; see `Rule`."""

    def register(handler: Handler) -> Handler:
        for pattern in patterns:
            head, *parts = pattern.split()
            rule = Rule(pattern, _regex(head, parts), handler, targets, uses, effects)
            RULES.setdefault(head.split(".")[0], []).append(rule)
        return handler

    return register


def _regex(head: str, parts: list[str]) -> re.Pattern[str]:
    text = re.escape(head)
    for part in parts:
        optional = part.endswith("?")
        choices = part.removesuffix("?").removeprefix(".").split("|")
        group = "|".join(map(re.escape, choices))
        text += (
            rf"(?:\.({group}))?" if optional else rf"\.({group})" if len(choices) > 1 else rf"\.{re.escape(choices[0])}"
        )
    return re.compile(text)


def find(ins: Instruction) -> tuple[Rule, tuple[str, ...]]:
    """The rule for an instruction, and the parts that were a choice. Raises UnknownInstruction."""
    rules = RULES.get(ins.opcode.split(".")[0], [])
    for rule in rules:
        match = rule.regex.fullmatch(ins.opcode)
        if match:
            return rule, tuple(group or "" for group in match.groups())
    known = "; ".join(rule.pattern for rule in rules)
    raise UnknownInstruction(
        f"{ins.opcode} is not modelled{f' (known: {known})' if known else ''}: {ins}", line=ins.line
    )


def translate(b: Block, ins: Instruction) -> None:
    """Emit the code of one instruction into a block, its checks first."""
    rule, parts = find(ins)
    arity.check(ins)
    if rule.effects:
        b.emit(f"w.at = {ins.line}")
    if rule.uses:
        b.use(*ins.operands[rule.targets :])
        b.use(*(operand for operand in ins.operands[: rule.targets] if str(operand).startswith("[")))
    rule.handler(b, ins, *parts)
