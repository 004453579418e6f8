"""The processes of a benchmark: alone, or those that torchrun started, which only wait for each
other and tell the first one what they measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among `size`."""

    rank: int = 0
    size: int = 1

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier()

    def gather(self, value: T) -> list[T] | None:
        """The values of all ranks, in their order, on rank 0; None on the others."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, found)
        return found


@contextmanager
def ranks_of_job() -> Iterator[Ranks]:
    """The ranks that torchrun's variables name; one rank without them.

    What goes wrong on a rank names it. The other ranks do not go on alone: torchrun ends them, or
    the connection to this one does.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if size == 1:
        yield Ranks()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield Ranks(rank, size)
    except (ValueError, RuntimeError) as error:
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        raise kind(f"rank {rank} of {size}: {error}") from error
    finally:
        dist.destroy_process_group()
