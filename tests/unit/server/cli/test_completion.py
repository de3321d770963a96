"""The scripts of `tidemark completion`; bash runs its own, the others are looked at."""

import subprocess

import pytest

from server.cli import completion
from server.cli.completion import Argument, Command

FORM = Argument(("-o", "--output"), "FORM", ("table", "json"), "how it's printed", required=False)
SERVER = Argument(("--server",), "SERVER", (), "whom to ask", required=False)
FILE = Argument((), "FILE", (), "what to check", required=True)
TOP = Command(
    (),
    "",
    below=(
        Command(
            ("cli",),
            "ask",
            (SERVER, FORM),
            (
                Command(
                    ("cli", "changefeed"),
                    "",
                    below=(Command(("cli", "changefeed", "list"), "all", (FORM,)),),
                ),
                Command(("cli", "capture"), "captures"),
            ),
        ),
        Command(("config",), "settings", (FILE,)),
    ),
)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ([""], ["cli", "config"]),
        (["c"], ["cli", "config"]),
        (["cl"], ["cli"]),
        (["cli", "ca"], ["capture"]),
        (["cli", "--server", "cap:8300", "ch"], ["changefeed"]),
        (["cli", "changefeed", ""], ["list"]),
        (["cli", "changefeed", "list", "--"], ["--output"]),
        (["cli", "changefeed", "list", "-o", ""], ["table", "json"]),
        (["cli", "changefeed", "list", "--output", "j"], ["json"]),
        (["config", "x"], []),
    ],
)
def test_bash_offers_what_may_come_next(typed, offered) -> None:
    words = " ".join(f"'{word}'" for word in ["tidemark", *typed])
    script = (
        f"{completion.bash(TOP)}\nCOMP_WORDS=({words}); COMP_CWORD={len(typed)}; _tidemark\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    assert ran.stdout.split() == offered


def test_zsh_reads_the_script_of_bash() -> None:
    assert completion.zsh(TOP).endswith(completion.bash(TOP))


def test_fish_is_told_what_each_word_is_for() -> None:
    script = completion.fish(TOP)
    assert (
        "complete -c tidemark -n '__tidemark_at \\' cli\\'' -f -a capture -d 'captures'" in script
    )
    assert "-s o -l output -x -a 'table json' -d 'how it\\'s printed'" in script


def test_each_argument_says_what_it_is():
    arguments = [each for command in completion.tidemark().walk() for each in command.arguments]
    assert [each for each in arguments if not each.text or "%(" in each.text] == []
