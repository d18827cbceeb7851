"""Options as a dataclass, and a command as a Python function."""

import inspect
import pydoc
from dataclasses import KW_ONLY, FrozenInstanceError
from pathlib import Path
from typing import Annotated

import pytest

from tapfm.errors import InputError, Interrupted
from tapfm.runtime.options import Argument, Option, command_function, options


@options
class CopyOptions:
    """Options of a command."""

    sources: Annotated[tuple[Path, ...], Argument("Files to copy.")]
    _: KW_ONLY
    out: Annotated[Path, Option("Folder for the copies.")]
    mask: Annotated[Path | None, Option("What to leave out.")] = None
    only: Annotated[tuple[str, ...], Option("Only these.")] = ()
    fractions: Annotated[tuple[float, float] | None, Option("Two shares.")] = None
    workers: Annotated[int | None, Option("Worker processes.", default="one per core", at_most=64)] = None
    seeds: Annotated[tuple[int, ...], Option("Seeds.", at_least=0)] = ()

    def check(self):
        if self.workers is not None and self.workers < 0:
            raise InputError("--workers is negative.")


@command_function(CopyOptions)
def copy(options, console):
    """Copy files."""
    console.print("copying")
    if options.workers == 9:
        raise Interrupted(2)
    return options


def test_text_becomes_a_path():
    given = CopyOptions(("a.txt",), out="there", mask="mask.png")
    assert given.sources == (Path("a.txt"),)
    assert given.out == Path("there")
    assert given.mask == Path("mask.png")


@pytest.mark.parametrize("sources", ["a", Path("a"), ["a"], ("a",), iter(["a"])])
def test_a_list_and_a_single_value_become_a_tuple(sources):
    assert CopyOptions(sources, out=".").sources == (Path("a"),)


def test_lists_become_tuples_of_the_same_items():
    given = CopyOptions(["a", Path("b")], out=".", only="one", fractions=[0.5, 0.5])
    assert given.sources == (Path("a"), Path("b"))
    assert given.only == ("one",)
    assert given.fractions == (0.5, 0.5)


def test_what_is_not_given_has_its_default():
    given = CopyOptions("a", out=".")
    assert (given.mask, given.only, given.fractions, given.workers) == (None, (), None, None)


def test_none_for_several_values_is_none_of_them():
    assert CopyOptions("a", out=".", only=None).only == ()


@pytest.mark.parametrize("given", [{"workers": 65}, {"seeds": [3, -1]}, {"seeds": -1}])
def test_numbers_outside_their_limits_are_refused(given):
    with pytest.raises(InputError, match=f"--{next(iter(given))} is "):
        CopyOptions("a", out=".", **given)


@pytest.mark.parametrize(
    "given",
    [
        {"workers": "two"},
        {"workers": 1.5},
        {"workers": True},
        {"seeds": ["a"]},
        {"mask": 3},
        {"out": None},
        {"only": [None]},
        {"fractions": [0.5]},
        {"fractions": "ab"},
        {"fractions": ["a", "b"]},
    ],
)
def test_values_of_the_wrong_type_are_refused(given):
    with pytest.raises(InputError, match=f"--{next(iter(given))} is "):
        CopyOptions("a", **({"out": "."} | given))


def test_numbers_become_text_and_whole_numbers_any_numbers_where_these_are_asked_for():
    given = CopyOptions("a", out=".", only=[0.4, Path("b")], fractions=[1, 0])
    assert given.only == ("0.4", "b")
    assert given.fractions == (1.0, 0.0)
    assert all(isinstance(each, float) for each in given.fractions)


def test_an_argument_without_any_value_is_refused():
    with pytest.raises(InputError, match="sources"):
        CopyOptions([], out=".")


def test_an_unknown_name_is_told_with_the_nearest_one():
    with pytest.raises(TypeError, match=r"copy\(\) has no option 'worker'. Did you mean 'workers'"):
        copy("a", out=".", worker=1)


def test_values_are_checked_and_stay():
    with pytest.raises(InputError, match="negative"):
        CopyOptions("a", out=".", workers=-1)
    with pytest.raises(FrozenInstanceError):
        CopyOptions("a", out=".").out = Path("elsewhere")


def test_a_verb_is_called_with_the_names_of_the_options(capsys):
    assert copy("a", out="there", only=["x"]) == CopyOptions(("a",), out=Path("there"), only=("x",))
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "copying\n")
    with pytest.raises(TypeError):
        copy("a", "there")  # options have names
    with pytest.raises(TypeError):
        copy("a", out="there", absent=1)


def test_a_verb_has_the_signature_and_the_help_of_its_options():
    assert copy.__name__ == "copy"
    parameters = inspect.signature(copy).parameters
    assert list(parameters) == ["sources", "out", "mask", "only", "fractions", "workers", "seeds"]
    assert parameters["sources"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert parameters["out"].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["out"].default is inspect.Parameter.empty
    assert (parameters["only"].annotation, parameters["only"].default) == (tuple[str, ...], ())
    assert (parameters["workers"].annotation, parameters["workers"].default) == (int | None, None)
    lines = pydoc.getdoc(copy).splitlines()
    assert lines[0].startswith("copy(sources: tuple[pathlib.Path, ...], *, out: pathlib.Path, ")
    assert lines[2] == "Copy files."
    assert "    out: Folder for the copies." in lines
    assert "    workers: Worker processes." in lines
    assert repr(copy) == "<function tapfm.copy>"


def test_a_signal_that_a_command_handled_is_a_keyboard_interrupt_in_python():
    with pytest.raises(KeyboardInterrupt):
        copy("a", out=".", workers=9)
