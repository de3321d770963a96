"""Applies groups of commands: one after the other against a draft, then one synced batch.

One thread at a time.

An outcome is handed out only after its group is durable; a command that fails leaves nothing of
itself in the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from storage.defect import request_error
from storage.kv import KV, WriteBatch
from storage.model.errors import CorruptError, TidemarkError
from storage.mvcc.draft import Change, Draft
from storage.mvcc.errors import MvccError
from storage.mvcc.read_fence import ReadFence

Command = Callable[[Draft], Any]
"""A decision bound to its request; what it returns is the command's result."""


STEP_KEYS = 1024
"""How many keys a command over a range looks at before it lets others have their turn."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The result of a command over a range that did a part of its work, and that for good;
    `rest` goes on.
    """

    rest: Command


@dataclass(frozen=True, slots=True)
class GroupResult:
    """Results aligned with the commands, MvccError, CorruptError and DefectError as values;
    changes as they were made.

    `unlocked` are the encoded keys that lost a lock, for those who wait for one.
    """

    results: Sequence[Any]
    changes: Sequence[Change]
    unlocked: Sequence[bytes] = ()


class Engine:
    """The write side of the store; what a group reserves in `fence` is released by whoever told its
    observers.
    """

    def __init__(self, kv: KV, fence: ReadFence | None = None) -> None:
        self.kv = kv
        self.fence = fence or ReadFence()
        self.old_values = False

    def apply(self, commands: Sequence[Command]) -> GroupResult:
        """Decide and store a group; durable when it returns.

        Raises:
            TidemarkError: the disk failed or is corrupt; nothing of the group may be relied on.
        """
        draft = Draft(self.kv, old_values=self.old_values, fence=self.fence)
        results: list[Any] = []
        for command in commands:
            try:
                results.append(command(draft))
            except (MvccError, CorruptError) as err:  # damage met by a command: the others go on
                draft.discard()
                results.append(err)
            except TidemarkError:
                raise  # the disk failed, not the command
            except Exception as err:  # noqa: BLE001 - nothing of the command is kept, and its neighbours go on
                draft.discard()
                results.append(request_error(err, "store command"))
            else:
                draft.accept()
        if draft.ops:
            batch = WriteBatch()
            batch.ops = draft.ops
            # Synced before any result is handed out: a client may act on an answer at once.
            self.kv.write(batch, sync=True)
        return GroupResult(results, draft.changes, draft.unlocked)
