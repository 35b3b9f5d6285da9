"""The longest sequence that a planned training has room for, on the machine that the plan is for."""

from __future__ import annotations

from dataclasses import replace

from infinity.bench.planning.planned import Planned, Question, answer

MOST_TOKENS = 1 << 28
"""Of a sequence: longer ones are not looked for."""
_UNIT = 1024
"""Tokens, on one rank, of which a longest sequence is a multiple."""


def longest_sequence(one: Planned) -> int | None:
    """Return the tokens of the longest sequence that fits, all else as planned: to 3 %, a multiple of 1,024
    of each rank that shares it; where none of these fits, the planned one if it does, else 0. None where that
    cannot be said, as nothing is known of the memory that activations take, or of what they take.
    """
    known = any(need.has_nbytes is not None and need.what.startswith("memory") for need in one.needs)
    if one.uncounted or not (known or one.refusal):
        return None
    question, sharers = replace(one.question, seconds=None, rates=None), one.setting.method.sequence_parallel
    last = MOST_TOKENS // (_UNIT * sharers)
    most = min(max(one.setting.method.sequence // (_UNIT * sharers), 1), last)
    least = 0
    while most < last and _fits(question, most):
        least, most = most, min(2 * most, last)
    while not least and most > 1 and not _fits(question, most // 2):
        most //= 2
    least = least or most // 2
    while most - least > max(1, least // 32):
        middle = (least + most) // 2
        least, most = (middle, most) if _fits(question, middle) else (least, middle)
    return least * _UNIT * sharers or (one.setting.method.sequence if one.fits else 0)


def _fits(question: Question, units: int) -> bool:
    method = question.setting.method
    rows = max(method.tokens * method.sequence_parallel // method.sequence, 1)
    tokens = units * _UNIT
    return answer(question.changed(tokens=rows * tokens, sequence=tokens * method.sequence_parallel)).fits
