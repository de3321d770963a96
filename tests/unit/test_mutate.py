"""The mutator of tests/mutate.py: what it changes, what it leaves alone, and its table."""

import tomllib

from tests.mutate import TABLE, TREE, mutants

SOURCE = '''"""A module: 1 + 1."""

import structlog

_log = structlog.get_logger()
Number = int | None


@frozen(slots=True)
class Counter:
    """Counts to 10."""

    bound: int = 10

    def add(self, count: int | None = None) -> bool:
        """Add 1."""
        assert self.bound > 0, "no bound"
        _log.info("added", count=1)
        if self.full and not (count or
                              self.bound):
            raise ValueError(f"{self.bound + 1} at most")
        self.bound += 1
        return "é" if self.bound < count else max(self.bound, count)
'''


def test_each_mutant_changes_one_place_and_compiles():
    names = []
    for mutant in mutants(SOURCE):
        compile(mutant.source, "counter.py", "exec")
        names.append(mutant.name)

        # What stands before and behind the place is the source's.
        before, after = mutant.name.split(": ", 1)[1].split(" -> ", 1)
        assert before.split()[0] in SOURCE.splitlines()[mutant.line - 1]
        assert "".join(after.split()) in "".join(mutant.source.split())
        assert (
            mutant.source.splitlines()[: mutant.line - 1] == SOURCE.splitlines()[: mutant.line - 1]
        )
        assert mutant.source.count("\n") <= SOURCE.count("\n")

    assert names == [
        "Counter.bound: 10 -> 11",
        "Counter.add: self.full and not (count or self.bound) -> not (count or self.bound)",
        "Counter.add: self.full and not (count or self.bound) -> self.full",
        "Counter.add: not (count or self.bound) -> count or self.bound",
        "Counter.add: count or self.bound -> self.bound",
        "Counter.add: count or self.bound -> count",
        'Counter.add: raise ValueError(f"{self.bound + 1} at most") -> pass',
        "Counter.add: self.bound += 1 -> pass",
        "Counter.add: 1 -> 2",
        'Counter.add: return "é" if self.bound < count else max(self.bound, count) -> return None',
        "Counter.add: self.bound < count -> self.bound <= count",
        "Counter.add: max(self.bound, count) -> min(self.bound, count)",
    ]


def test_the_table_names_modules_tests_and_mutants_that_there_are():
    for module, entry in tomllib.loads(TABLE.read_text()).items():
        assert all((TREE / path).exists() for path in (module, *entry["tests"]))
        names = {mutant.name for mutant in mutants((TREE / module).read_text())}
        assert set(entry.get("equivalent", {})) <= names, module
