"""The table of opcodes: what it takes, what it refuses, and that every pattern in it runs in some test program."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import asynchronous
import cases
import effects
import programs
import pytest
import tensor_core
import tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import Batch, batches

from wanfp4.simulator import grammar, ops
from wanfp4.simulator.findings import UnknownInstruction
from wanfp4.simulator.ptx import Instruction, read_kernels

assert ops  # importing it fills the table
PATTERNS = [(head, rule.pattern) for head, rules in grammar.RULES.items() for rule in rules]
Part = tuple[tuple[tuple[str, ...], ...], bool]  # choices, each a row of tokens; whether it may be missing


@cache
def parts(pattern: str) -> tuple[Part, ...]:
    """A pattern, read again from what `grammar.op` says of it."""
    head, *rest = pattern.split()
    found: list[Part] = [((tuple(head.split(".")),), False)]
    for text in rest:
        optional = text.endswith("?")
        choices = text.removesuffix("?").removeprefix(".").split("|")
        found.append((tuple(tuple(choice.split(".")) for choice in choices), optional))
    return tuple(found)


def accepts(pattern: str, tokens: tuple[str, ...], at: int = 0) -> bool:
    """Whether a pattern takes an opcode, by trying."""
    rest = parts(pattern)[at:]
    if not rest:
        return not tokens
    choices, optional = rest[0]
    if optional and accepts(pattern, tokens, at + 1):
        return True
    return any(tokens[: len(c)] == c and accepts(pattern, tokens[len(c) :], at + 1) for c in choices)


def overlap(first: str, second: str) -> tuple[str, ...] | None:
    """An opcode that both patterns take, if there is one."""
    seen = set()

    def steps(
        pattern: str, state: tuple[int, tuple[str, ...]]
    ) -> Iterator[tuple[str | None, tuple[int, tuple[str, ...]]]]:
        """From (part, tokens still to come of a choice): the token that comes next, None at the end."""
        at, pending = state
        if pending:
            yield pending[0], (at, pending[1:])
            return
        if at == len(parts(pattern)):
            yield None, state
            return
        choices, optional = parts(pattern)[at]
        for choice in choices:
            yield choice[0], (at + 1, choice[1:])
        if optional:
            yield from steps(pattern, (at + 1, ()))

    def search(
        a: tuple[int, tuple[str, ...]], b: tuple[int, tuple[str, ...]], path: tuple[str, ...]
    ) -> tuple[str, ...] | None:
        if (a, b) in seen:
            return None
        seen.add((a, b))
        for (x, after), (y, other) in itertools.product(steps(first, a), steps(second, b)):
            if x == y:
                found = path if x is None else search(after, other, (*path, x))
                if found is not None:
                    return found
        return None

    return search((0, ()), (0, ()), ())


def instruction(opcode: str) -> Instruction:
    return Instruction(None, False, opcode, ("%r1", "%r2"), 7)


def shortest(pattern: str) -> str:
    return ".".join(itertools.chain.from_iterable(choices[0] for choices, optional in parts(pattern) if not optional))


def test_patterns_are_distinct():
    regexes = [rule.regex.pattern for rules in grammar.RULES.values() for rule in rules]
    assert len(set(regexes)) == len(regexes)


def test_no_opcode_belongs_to_two_rules():
    pairs = [
        (a.pattern, b.pattern, ".".join(common))
        for rules in grammar.RULES.values()
        for a, b in itertools.combinations(rules, 2)
        if (common := overlap(a.pattern, b.pattern)) is not None
    ]
    assert not pairs
    assert overlap("cvt .a? .b .c|d", "cvt .c? .b.d") == ("cvt", "b", "d")  # it does find some
    assert overlap("x .a? .b", "x .b .a") is None


@pytest.mark.parametrize("pattern", [pattern for _, pattern in PATTERNS])
def test_a_pattern_takes_each_of_its_choices(pattern):
    """And gives the handler what was chosen, in order."""
    (rule,) = (rule for rules in grammar.RULES.values() for rule in rules if rule.pattern == pattern)
    whole = [(choices[0], optional or len(choices) > 1) for choices, optional in parts(pattern)]
    for index, (choices, optional) in enumerate(parts(pattern)):
        for choice in [*choices, *([()] if optional else [])]:
            picked = [*whole[:index], (choice, whole[index][1]), *whole[index + 1 :]]
            tokens = tuple(itertools.chain.from_iterable(token for token, _ in picked))
            found, groups = grammar.find(instruction(".".join(tokens)))
            assert found is rule
            assert groups == tuple(".".join(token) for token, captured in picked[1:] if captured)


VOCABULARY = sorted(
    {token for _, pattern in PATTERNS for choices, _ in parts(pattern) for choice in choices for token in choice}
    | {
        "approx",
        "noftz",
        "cta_group::2",
        "x256",
        "16x64b",
        "v16",
        "e5m3",
        "rs",
        "xyz",
        "kind::i8",
        "sp",
        "ws",
        "multicast::cluster",
    }
)


def judged(opcode: str) -> None:
    """Exactly one rule takes it, or it is refused with line and text, as an independent reading of the table says."""
    tokens = tuple(opcode.split("."))
    takers = [pattern for head, pattern in PATTERNS if head == tokens[0] and accepts(pattern, tokens)]
    if takers:
        assert [grammar.find(instruction(opcode))[0].pattern] == takers
        return
    with pytest.raises(UnknownInstruction) as caught:
        grammar.find(instruction(opcode))
    assert caught.value.line == 7
    assert f"{opcode} is not modelled" in str(caught.value)
    assert f"{opcode} %r1, %r2;" in str(caught.value)


@given(st.sampled_from(sorted(grammar.RULES)), st.lists(st.sampled_from(VOCABULARY), max_size=6))
@settings(max_examples=300)
def test_soups_of_modifiers(head, modifiers):
    judged(".".join([head, *modifiers]))


@given(st.data())
@settings(max_examples=300)
def test_opcodes_with_a_modifier_more_or_less_or_elsewhere(data):
    _, pattern = data.draw(st.sampled_from(PATTERNS))
    chosen = [
        data.draw(st.sampled_from([*choices, *([()] if optional else [])])) for choices, optional in parts(pattern)
    ]
    tokens = list(itertools.chain.from_iterable(chosen))
    judged(".".join(tokens))
    at = data.draw(st.integers(1, len(tokens)))
    change = data.draw(st.sampled_from(["insert", "remove", "swap", "replace"]))
    if change == "insert" or len(tokens) == 1:
        tokens.insert(at, data.draw(st.sampled_from(VOCABULARY)))
    elif change == "remove":
        del tokens[min(at, len(tokens) - 1)]
    elif change == "replace":
        tokens[min(at, len(tokens) - 1)] = data.draw(st.sampled_from(VOCABULARY))
    else:
        other = data.draw(st.integers(1, len(tokens) - 1))
        at = min(at, len(tokens) - 1)
        tokens[at], tokens[other] = tokens[other], tokens[at]
    judged(".".join(tokens))


@pytest.mark.parametrize(
    "line",
    [
        "add.f64 %d0, %d1, %d2;",
        "tcgen05.mma.cta_group::2.kind::f16 [%r0], %d1, %d2, %r3, %p1;",
        "tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r1}, [%r0];",
        "mbarrier.try_wait.shared.b64 %p1, [%r0], %d1;",
        "bra.divergent L;",
        "setp.lo.s32 %p1, %r1, %r2;",
        "setp.lt.b32 %p1, %r1, %r2;",
        "cvt.ftz.f32.bf16 %f1, %h1;",
        "atom.global.cas.b32 %r1, [%d0], %r2, %r3;",
        "trap;",
    ],
)
def test_what_is_not_modelled_is_refused_with_line_and_text(line):
    text = programs.kernel(f"{line}\nL: ret;")
    where = text.split("\n").index(line) + 1
    with pytest.raises(UnknownInstruction) as caught:
        programs.translated(text, False)
    assert caught.value.line == where
    assert line in str(caught.value)


def opcodes(texts: list[str]) -> set[str]:
    return {ins.opcode for text in texts for ins in read_kernels(text)["k"].instructions}


def all_texts() -> list[str]:
    """Every test program that is run against a truth, and fails when one of its instructions is never reached."""
    texts = [Batch(batch).text for make in cases.FAMILIES.values() for batch in batches(make())]
    texts += [make().text for make in (*effects.PROGRAMS.values(), *asynchronous.PROGRAMS.values())]
    texts += [*tensors.LOADS.values(), *tensors.STORES.values(), *tensors.REDUCTIONS.values()]
    return [
        *texts,
        effects.FLAGS,
        tensor_core.copies().text,
        *(tensor_core.product(p).text for p in tensor_core.PRODUCTS),
    ]


def test_every_pattern_and_every_choice_in_it_runs_in_a_program():
    """A pattern that no program exercises, or a modifier, is a promise that nothing keeps."""
    seen = {pattern: [set() for _ in parts(pattern)] for _, pattern in PATTERNS}
    for opcode in opcodes(all_texts()):
        rule, _ = grammar.find(instruction(opcode))
        rest = tuple(opcode.split("."))
        for index, (choices, optional) in enumerate(parts(rule.pattern)):
            fits = [c for c in [*choices, *([()] if optional else [])] if rest[: len(c)] == c]
            fits = [c for c in fits if accepts(rule.pattern, rest[len(c) :], index + 1)]
            seen[rule.pattern][index].add(fits[0])
            rest = rest[len(fits[0]) :]
    missing = [
        f"{pattern}: {'.'.join(choice) or 'without ' + str(choices)}"
        for pattern, found in seen.items()
        for (choices, optional), have in zip(parts(pattern), found, strict=True)
        for choice in [*choices, *([()] if optional else [])]
        if choice not in have
    ]
    assert not missing, f"{len(missing)} choices in no program:\n" + "\n".join(missing)
