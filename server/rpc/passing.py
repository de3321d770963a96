"""Which locks a read may look through: kvrpcpb.Context's resolved_locks and committed_locks."""

from dataclasses import dataclass

from kvproto import kvrpcpb_pb2 as kvrpcpb


@dataclass(frozen=True, slots=True)
class Passing:
    """Transactions whose locks a read passes: `resolved` ones commit later or never, `committed` ones already did."""

    resolved: frozenset[int] = frozenset()
    committed: frozenset[int] = frozenset()

    def __or__(self, other: "Passing") -> "Passing":
        """Both."""
        return Passing(self.resolved | other.resolved, self.committed | other.committed)

    def context(self) -> kvrpcpb.Context:
        """The part of a request's context that says so."""
        return kvrpcpb.Context(resolved_locks=self.resolved, committed_locks=self.committed)


NOTHING_PASSED = Passing()
