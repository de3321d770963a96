"""`python -m tests.walk [--clone DIR] [PAGE …]`: pastes the shell blocks of the pages, in order,
as a stranger would.

Each page has one shell, in a clone of what is committed, with nothing in its environment but HOME
and PATH. Prints the time and the exit status of each block, and ends with the first one that fails.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from tests.walk.blocks import ROOT, Block, blocks, pages

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BLOCK_SECONDS = 1800.0
_END_SECONDS = 120.0
_INTERRUPTED = (
    0,
    128 + signal.SIGINT,
    -signal.SIGINT,
)  # make dies of the signal, after its children
_SHOWN = 6000
_DONE = "walk-has-done"


class FailedError(Exception):
    """A block failed."""


class Shell:
    """A bash that blocks are pasted into; what they print goes to a file,
    and is shown if one fails.
    """

    def __init__(self, clone: Path, output: Path) -> None:
        self._output = output
        self._pasted = 0
        environment = {"HOME": os.environ["HOME"], "PATH": _PATH, "LANG": "C.UTF-8"}
        with output.open("wb") as file:
            self._bash = subprocess.Popen(
                # Whoever was started in the background ignores Ctrl-C, and so would all it starts.
                ["env", "--default-signal=INT", "bash", "--noprofile", "--norc"],
                stdin=subprocess.PIPE, stdout=file, stderr=file, cwd=clone, env=environment, start_new_session=True,
            )  # fmt: skip
        self._paste("trap 'failed=$?' ERR")

    def run(self, block: Block) -> int:
        """Paste a block and wait for its end; the exit status of the last command in it that
        failed, or 0.
        """
        return int(self._wait(self._start(block)).partition("-end")[0])

    def run_beside(self, block: Block) -> None:
        """Paste a block and wait until it prints what its comment names."""
        self._wait(block.until, ended=self._start(block))

    def _start(self, block: Block) -> str:
        """Let the shell read the block from a file, so that its commands cannot take what is pasted
        next as input; what it prints at the block's end, before the status.
        """
        self._pasted += 1
        script = self._output.with_suffix(f".{self._pasted}.sh")
        script.write_text(block.text, encoding="utf-8")
        self._paste(f"failed=0; source {script} < /dev/null")
        ended = f"{_DONE}-{self._pasted}-"
        self._paste(f"echo {ended}$failed-end")
        return ended

    def end(self) -> int:
        """Press Ctrl-C, leave the shell, and return the exit status of what was running."""
        self._paste("exit $failed")
        self._signal(signal.SIGINT)
        self._close_input()
        return self._bash.wait(_END_SECONDS)

    def kill(self) -> None:
        """End the shell and all that it runs, at once."""
        self._close_input()
        self._signal(signal.SIGKILL)
        self._bash.wait()

    def _close_input(self) -> None:
        assert self._bash.stdin is not None
        with suppress(BrokenPipeError):
            self._bash.stdin.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._bash.pid, number)

    def printed(self) -> str:
        """What the blocks have printed so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def _paste(self, text: str) -> None:
        assert self._bash.stdin is not None
        self._bash.stdin.write(f"{text}\n".encode())
        self._bash.stdin.flush()

    def _wait(self, text: str, ended: str = "") -> str:
        """Wait for `text`; what follows it. A block that prints `ended` before has failed."""
        deadline = time.monotonic() + _BLOCK_SECONDS
        while True:
            before, there, after = self.printed().partition(text)
            if there and "\n" in after:
                return after
            has_ended = bool(ended) and ended in before
            if has_ended or self._bash.poll() is not None or time.monotonic() > deadline:
                raise FailedError(
                    f"{text!r} was never printed; at the end stands:\n{before[-3000:]}"
                )
            time.sleep(0.1)


class Walk:
    """The blocks of one page: most go to one shell,
    and each that is to run beside others has its own.
    """

    def __init__(self, clone: Path, logs: Path) -> None:
        self._clone = clone
        self._logs = logs
        self._shell = Shell(clone, logs / "0")
        self._beside: list[Shell] = []

    def paste(self, block: Block) -> None:
        """Paste a block, and print how long it took.

        Raises:
            FailedError: it failed; with what was printed.
        """
        if block.skipped:
            _say(block, f"left out: {block.skipped}")
            return
        if block.ending:
            self.end_beside()
        began = time.monotonic()
        if block.until:
            self._beside.append(Shell(self._clone, self._logs / str(len(self._beside) + 1)))
            self._beside[-1].run_beside(block)
            _say(block, f"{time.monotonic() - began:6.1f} s  goes on")
            return
        status = self._shell.run(block)
        _say(block, f"{time.monotonic() - began:6.1f} s  status {status}")
        if status:
            raise FailedError(self._shell.printed()[-_SHOWN:])

    def end_beside(self) -> None:
        """Press Ctrl-C where something goes on.

        Raises:
            FailedError: it does not end well.
        """
        while self._beside:
            shell = self._beside.pop()
            status = shell.end()
            print(f"Ctrl-C: status {status}", flush=True)
            if status not in _INTERRUPTED:
                raise FailedError(shell.printed()[-_SHOWN:])

    def close(self) -> None:
        """Leave all shells, whatever runs."""
        for shell in (*self._beside, self._shell):
            shell.kill()


def walk(clone: Path, page: Path) -> bool:
    """Paste the blocks of one page; returns whether all went well."""
    with (
        tempfile.TemporaryDirectory(prefix="tidemark-walk-") as logs,
        closing(Walk(clone, Path(logs))) as walking,
    ):
        try:
            for block in blocks(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")):
                walking.paste(block)
            walking.end_beside()
        except FailedError as err:
            print(err)
            return False
    return True


def _say(block: Block, text: str) -> None:
    print(f"{block.page}:{block.line}  {text}  | {block.text.splitlines()[0]}", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Walk through all pages, or those that are named; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.walk", allow_abbrev=False)
    parser.add_argument(
        "--clone", type=Path, help="a clone to walk in, and to keep; default: a fresh one"
    )
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="such as README.md; default: all")
    given = parser.parse_args(arguments)
    chosen = [
        page for page in pages() if not given.pages or str(page.relative_to(ROOT)) in given.pages
    ]
    with tempfile.TemporaryDirectory(prefix="tidemark-clone-") as place:
        clone = given.clone or Path(place) / "tidemark"
        if not clone.exists():
            subprocess.run(["git", "clone", "--quiet", "--local", ROOT, clone], check=True)
        return 0 if all(walk(clone, page) for page in chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
