"""What each rank of a launched program answers, for the test that has launched it."""

import functools
import gc
import json
import traceback
from pathlib import Path

import torch.distributed as dist

import infinity


def answer_of(call):
    """Return what a call answers, or its error, when the engines that it leaves have ended."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the others' answers count
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    finally:
        gc.collect()  # else gloo's threads of engines that nobody has take a good part of the cores


def answer_all(folder, names, run, *, ends=lambda _: False, before=None):
    """Write what `run` answers for each of the names, or its error, to FOLDER/RANK.json; leave the others.

    ends: whether nothing goes on behind an answer. before: further answers.
    """
    answers = dict(before or {})
    for name in names:
        answers[name] = answer_of(functools.partial(run, name))
        if ends(answers[name]):
            break
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(answers), encoding="utf-8")
    dist.destroy_process_group()


def is_of_ranks(answer):
    """Whether the ranks can do nothing together behind this answer."""
    return answer.get("error", "").startswith("RanksError")


def error_of(call):
    """Return the error that a call ends with."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - of many kinds
        return f"{type(error).__name__}: {error}"
    return "no error"


def refused(call):
    """Return the error that a call ends with: that which torch names as the cause of its own, if it does."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - torch's are of many kinds
        while error.__cause__ is not None and not isinstance(error, infinity.InfinityError):
            error = error.__cause__
        return f"{type(error).__name__}: {error}"
    return "no error"


def read_answers(folder: Path, ranks: int, *, missing: bool = False) -> list[dict]:
    """Read what each rank wrote; missing: a rank that was to die has written nothing."""
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(one.read_text(encoding="utf-8")) for one in files if one.exists() or not missing]


def answering(launched):
    """Return a function that says what each rank of a launch answers in a case. launched: runs a launch, by
    its name, and returns what its ranks have answered; called once for each.
    """
    all_of = functools.cache(launched)

    def answer(launch, case):
        given = [one[case] for one in all_of(launch)]
        traces = [one["trace"] for one in given if "trace" in one]
        assert traces == [], "".join(traces)
        return given

    return answer


def assert_as_reference(given, cases):
    """Check that ranks have told no difference in any of these cases."""
    for case in cases:
        assert [one[case].get("different", one[case]) for one in given] == [[]] * len(given), case
