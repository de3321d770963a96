"""Percolator on plain dicts: the oracle. Written from the rules, not from the implementation."""

from dataclasses import dataclass, field


@dataclass
class ModelLock:
    start_ts: int
    op: str  # put, delete, lock, pessimistic
    value: bytes
    for_update_ts: int = 0


@dataclass
class ModelKey:
    lock: ModelLock | None = None
    commits: dict[int, tuple[int, str, bytes]] = field(
        default_factory=dict
    )  # commit_ts -> (start_ts, op, value)
    rolled_back: set[int] = field(default_factory=set)


class Model:
    """Every operation returns the name of what happened: "ok", or the name of the error."""

    def __init__(self) -> None:
        self.keys: dict[bytes, ModelKey] = {}

    def key(self, key: bytes) -> ModelKey:
        return self.keys.setdefault(key, ModelKey())

    def outcome(self, key: bytes, start_ts: int) -> int | None:
        """commit_ts, 0 when rolled back, None when nothing is known."""
        state = self.key(key)
        if start_ts in state.rolled_back:
            return 0
        return next(
            (commit_ts for commit_ts, (start, _, _) in state.commits.items() if start == start_ts),
            None,
        )

    def prewrite(
        self, mutations: dict[bytes, tuple[str, bytes]], start_ts: int, for_update_ts: int = 0
    ) -> str:
        result = "ok"
        for key in mutations:
            state = self.key(key)
            if state.lock is not None and state.lock.start_ts != start_ts:
                if for_update_ts:
                    return "lost"
                result = "locked"
            elif state.lock is None:
                if self.outcome(key, start_ts):
                    return "ok"  # a late copy: the transaction is committed
                if for_update_ts:
                    newest = max([*state.commits, *state.rolled_back], default=-1)
                    if newest >= start_ts:
                        return "lost"
                elif start_ts in state.rolled_back or max(state.commits, default=0) > start_ts:
                    return "conflict"
        if result == "ok":
            for key, (op, value) in mutations.items():
                lock = self.key(key).lock
                if lock is None or lock.op == "pessimistic":
                    self.key(key).lock = ModelLock(start_ts, op, value, for_update_ts)
        return result

    def commit(self, keys: list[bytes], start_ts: int, commit_ts: int) -> str:
        for key in keys:
            lock = self.key(key).lock
            if (lock is None or lock.start_ts != start_ts) and not self.outcome(key, start_ts):
                return "gone"
        for key in keys:
            state = self.key(key)
            if state.lock is not None and state.lock.start_ts == start_ts:
                if state.lock.op != "pessimistic":
                    state.commits[commit_ts] = (start_ts, state.lock.op, state.lock.value)
                state.lock = None
        return "ok"

    def rollback(self, keys: list[bytes], start_ts: int) -> str:
        if any(self.outcome(key, start_ts) for key in keys):
            return "committed"
        for key in keys:
            state = self.key(key)
            if state.lock is not None and state.lock.start_ts == start_ts:
                state.lock = None
            state.rolled_back.add(start_ts)
        return "ok"

    def lock(self, keys: list[bytes], start_ts: int, for_update_ts: int) -> str:
        for key in keys:
            state = self.key(key)
            if state.lock is not None and state.lock.start_ts != start_ts:
                return "locked"
            if state.lock is not None and state.lock.op != "pessimistic":
                return "lost"
            if state.lock is None and self.outcome(key, start_ts):
                return "committed"
            if state.lock is None and (
                start_ts in state.rolled_back or max(state.commits, default=0) > for_update_ts
            ):
                return "conflict"
        for key in keys:
            held = self.key(key).lock
            most = max(for_update_ts, held.for_update_ts) if held else for_update_ts
            self.key(key).lock = ModelLock(start_ts, "pessimistic", b"", most)
        return "ok"

    def unlock(self, keys: list[bytes], start_ts: int, for_update_ts: int) -> str:
        for key in keys:
            lock = self.key(key).lock
            if (
                lock is not None
                and lock.op == "pessimistic"
                and lock.start_ts == start_ts
                and lock.for_update_ts <= for_update_ts
            ):
                self.key(key).lock = None
        return "ok"

    def get(self, key: bytes, ts: int) -> bytes | str | None:
        state = self.key(key)
        if (
            state.lock is not None
            and state.lock.op in ("put", "delete")
            and state.lock.start_ts <= ts
        ):
            return "locked"
        return self.value(key, ts)

    def value(self, key: bytes, ts: int) -> bytes | None:
        data = [
            (commit_ts, op, value)
            for commit_ts, (_, op, value) in self.key(key).commits.items()
            if commit_ts <= ts and op in ("put", "delete")
        ]
        if not data:
            return None
        _, op, value = max(data)
        return value if op == "put" else None
