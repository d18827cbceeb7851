"""Options dataclasses, and commands as Python functions."""

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
    """Options of the test command."""

    sources: Annotated[tuple[Path, ...], Argument("Files to copy.")]
    _: KW_ONLY
    out: Annotated[Path, Option("Folder for the copies.")]
    mask: Annotated[Path | None, Option("Files to exclude.")] = None
    only: Annotated[tuple[str, ...], Option("Only these.")] = ()
    fractions: Annotated[tuple[float, float] | None, Option("Two fractions.")] = None
    workers: Annotated[int | None, Option("Worker processes.", show_default="one per core", at_most=64)] = None
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


def test_text_is_converted_to_a_path():
    given = CopyOptions(("a.txt",), out="copies", mask="mask.png")
    assert given.sources == (Path("a.txt"),)
    assert given.out == Path("copies")
    assert given.mask == Path("mask.png")


@pytest.mark.parametrize("sources", ["a", Path("a"), ["a"], ("a",), iter(["a"])])
def test_list_and_single_value_are_converted_to_a_tuple(sources):
    assert CopyOptions(sources, out=".").sources == (Path("a"),)


def test_lists_are_converted_to_tuples():
    given = CopyOptions(["a", Path("b")], out=".", only="one", fractions=[0.5, 0.5])
    assert given.sources == (Path("a"), Path("b"))
    assert given.only == ("one",)
    assert given.fractions == (0.5, 0.5)


def test_omitted_options_have_their_defaults():
    given = CopyOptions("a", out=".")
    assert (given.mask, given.only, given.fractions, given.workers) == (None, (), None, None)


def test_none_for_a_repeatable_option_is_an_empty_tuple():
    assert CopyOptions("a", out=".", only=None).only == ()


@pytest.mark.parametrize("given", [{"workers": 65}, {"seeds": [3, -1]}, {"seeds": -1}])
def test_numbers_out_of_range_raise_input_error(given):
    with pytest.raises(InputError, match=f"--{next(iter(given))} must be "):
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
def test_values_of_the_wrong_type_raise_input_error(given):
    with pytest.raises(InputError, match=f"--{next(iter(given))} is "):
        CopyOptions("a", **({"out": "."} | given))


def test_numbers_are_converted_to_text_and_integers_to_floats():
    given = CopyOptions("a", out=".", only=[0.4, Path("b")], fractions=[1, 0])
    assert given.only == ("0.4", "b")
    assert given.fractions == (1.0, 0.0)
    assert all(isinstance(each, float) for each in given.fractions)


def test_empty_argument_raises_input_error():
    with pytest.raises(InputError, match="sources"):
        CopyOptions([], out=".")


def test_unknown_option_suggests_the_most_similar_one():
    with pytest.raises(TypeError, match=r"copy\(\) has no option 'worker'. Did you mean 'workers'"):
        copy("a", out=".", worker=1)


def test_options_are_checked_and_frozen():
    with pytest.raises(InputError, match="negative"):
        CopyOptions("a", out=".", workers=-1)
    with pytest.raises(FrozenInstanceError):
        CopyOptions("a", out=".").out = Path("elsewhere")


def test_command_function_takes_options_as_keyword_arguments(capsys):
    assert copy("a", out="copies", only=["x"]) == CopyOptions(("a",), out=Path("copies"), only=("x",))
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "copying\n")
    with pytest.raises(TypeError):
        copy("a", "copies")  # options are keyword-only
    with pytest.raises(TypeError):
        copy("a", out="copies", absent=1)


def test_command_function_has_signature_and_help_of_its_options():
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


def test_command_function_raises_keyboard_interrupt_after_a_signal():
    with pytest.raises(KeyboardInterrupt):
        copy("a", out=".", workers=9)
