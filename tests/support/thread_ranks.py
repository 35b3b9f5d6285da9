"""Ranks of one sequence as threads of this process: what they exchange goes from hand to hand, without gloo.

Each rank has a model of its own; on the CPU a backward runs on the thread that calls it.
"""

import threading
from collections import Counter

import torch


class ThreadGroup:
    """One rank's sequences.group.SequenceGroup, among threads."""

    def __init__(self, table, rank, size):
        self._table, self.rank, self.size = table, rank, size
        self.nbytes = Counter()

    def _all(self, mine):
        """What every rank gives, in their order."""
        self._table.given[self.rank] = mine
        self._table.barrier.wait()
        everything = list(self._table.given)
        self._table.barrier.wait()
        return everything

    def exchange(self, rows, what):
        self.nbytes[what] += rows.nbytes
        return torch.stack([one[self.rank] for one in self._all(rows)])

    def gather(self, values, _what):
        return torch.stack(self._all(values.detach().to("cpu", torch.float64).reshape(-1)))

    def spread(self, values, root, _what):
        values.copy_(self._all(values)[root])

    @property
    def ranks(self):
        """What ranks.group.Ranks has for bytes."""
        return self

    def each(self, said, _what):
        return self._all(said)


class Table:
    """Where ranks put what they give the others."""

    def __init__(self, size):
        self.barrier, self.given = threading.Barrier(size), [None] * size


def on_ranks(size, work, kind=ThreadGroup):
    """Run work(group) on so many ranks; return what each returns. kind: the group's class.

    Raises: the first error of a rank.
    """
    table, results, errors = Table(size), [None] * size, []

    def run(rank):
        try:
            results[rank] = work(kind(table, rank, size))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:  # noqa: BLE001
            errors.append(error)
            table.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if errors:
        raise errors[0]
    return results
