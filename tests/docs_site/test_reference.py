"""The reference pages are up to date, and every name in them has a meaning."""

import re
from pathlib import Path
from typing import Annotated

import pytest
import reference
import reference_commands
import reference_configuration
import reference_formats
import typer
from reference_commands import generate_commands_page
from reference_configuration import generate_configuration_page, recipe_text
from reference_formats import find_meanings, generate_formats_page
from reference_meanings import Format
from reference_readers import Entry
from reference_samples import create_sample_files
from reference_text import escape_text, format_table

from tapfm.config.loading import list_settings
from tapfm.config.settings import RunConfig
from tapfm.study.presets import PRESETS

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
OUTDATED = "docs/reference is outdated. Run: make docs"


def read_lines(name):
    return (FOLDER / name).read_text("utf-8").splitlines()


@pytest.fixture(scope="module")
def sample_files(tmp_path_factory, one_thread):  # noqa: ARG001 - for the whole module
    folder = tmp_path_factory.mktemp("samples")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAPFM_CACHE", str(tmp_path_factory.mktemp("cache")))
        create_sample_files(folder)
    return folder


def test_commands_page_is_up_to_date():
    assert read_lines("commands.md") == generate_commands_page().splitlines(), OUTDATED


def test_configuration_page_is_up_to_date():
    assert read_lines("configuration.md") == generate_configuration_page().splitlines(), OUTDATED


def test_formats_page_is_up_to_date(sample_files):
    assert read_lines("file-formats.md") == generate_formats_page(sample_files).splitlines(), OUTDATED


def test_the_folder_has_no_other_pages():
    assert {path.name for path in FOLDER.iterdir()} == {*reference.PAGES, "glossary.md"}


def test_check_lists_an_outdated_page_and_a_run_without_it_writes_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reference, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["reference.py", "--only", "commands.md", "--check"])
    with pytest.raises(SystemExit, match="1"):
        reference.main()
    output = capsys.readouterr().out
    assert "commands.md" in output
    assert "make docs" in output
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("sys.argv", ["reference.py", "--only", "commands.md"])
    with pytest.raises(SystemExit, match="0"):
        reference.main()
    assert (tmp_path / "commands.md").read_text("utf-8") == generate_commands_page()


def one_command(**options):
    app = typer.Typer()

    @app.command()
    def sing(
        song: Annotated[Path, typer.Argument(metavar="SONG|LIST", help="What to sing <loud>.")],
        verses: Annotated[int, typer.Option("--verses", metavar="N", min=1, max=9, help="How many.")] = 3,
        voices: Annotated[list[str] | None, typer.Option("--voice", help="Who.", show_default="all")] = None,
        hum: Annotated[bool, typer.Option("--hum/--words", **options)] = False,
    ) -> None:
        """Sing a song.

        \b
        Examples:
          tapfm sing song.txt --hum

        It takes
        a while.
        """

    @app.command(hidden=True)
    def whisper() -> None:
        """Sing so that nobody hears it."""

    return app


def test_every_visible_command_is_on_the_page(monkeypatch):
    monkeypatch.setattr(reference_commands, "app", one_command(help="Without / with words."))
    page = generate_commands_page()
    assert "| [`tapfm sing`](#tapfm-sing) | Sing a song. |" in page
    assert "\nExamples:\n\n    tapfm sing song.txt --hum\n" in page
    assert "\nIt takes a while.\n" in page
    assert "| `SONG` or `LIST` | yes | What to sing &lt;loud>. |" in page
    assert "| `--verses N` | integer, 1 to 9 | `3` | How many. |" in page
    assert "| `--voice` | text, repeatable | all | Who. |" in page
    assert "| `--hum` `--words` | flag | - | Without / with words. |" in page
    assert "whisper" not in page


def test_an_option_without_help_is_an_error(monkeypatch):
    monkeypatch.setattr(reference_commands, "app", one_command())
    with pytest.raises(ValueError, match="tapfm sing: --hum"):
        generate_commands_page()


def test_an_exit_code_without_a_meaning_is_an_error(monkeypatch):
    monkeypatch.delitem(reference_commands.EXIT_CODES, 3)
    with pytest.raises(ValueError, match="3"):
        generate_commands_page()


def test_every_setting_is_on_the_page():
    page = generate_configuration_page()
    for section, *key in list_settings():
        has_keys = section not in ("recipe", "seed")
        assert f"### [{section}]" in page if has_keys else f"| `{section}` |" in page
        if key:
            part = page.partition(f"### [{section}]\n")[2].partition("\n### ")[0]
            assert f"| `{key[0]}` |" in part
    assert all(f"| `{name}` |" in page for name in PRESETS)


def test_a_setting_without_a_description_is_an_error(monkeypatch):
    monkeypatch.setattr(RunConfig.model_fields["seed"], "description", None)
    with pytest.raises(ValueError, match="seed"):
        generate_configuration_page()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adaptation.tau", "`1.0`; reference: `0.1`"),
        ("schedule.epochs", "`20`; finetune and fixed: `50`"),
        ("schedule.first_cycle", "`10`; reference: same as `schedule.epochs`"),
        ("augmentation.flip", "`0.5`"),
        ("optimiser.encoder_lr", "[by encoder](#defaults-by-encoder)"),
    ],
)
def test_recipe_text_lists_the_defaults_of_each_recipe(name, expected):
    assert recipe_text(name) == expected


def test_recipes_that_differ_in_an_unsupported_way_are_an_error(monkeypatch):
    monkeypatch.setattr(
        reference_configuration,
        "recipe_values",
        lambda recipe, method, _encoder, _epochs=None: {"a.b": 1 if recipe == "paper" else len(method)},
    )
    with pytest.raises(ValueError, match=r"a\.b"):
        recipe_text("a.b")


def test_a_name_without_a_meaning_is_an_error():
    with pytest.raises(ValueError, match=r"x\.csv: .*unheard_of"):
        find_meanings(Format("x.csv", "x", "A table."), [Entry("slide_id"), Entry("unheard_of")], set())


def test_a_meaning_without_a_name_is_an_error():
    with pytest.raises(ValueError, match=r"x\.csv .*gone"):
        find_meanings(Format("x.csv", "x", "A table.", {"gone": "it was here"}), [Entry("slide_id")], set())


def test_a_common_meaning_that_no_file_uses_is_an_error(sample_files, monkeypatch):
    monkeypatch.setitem(reference_formats.COMMON, "nowhere", "in no file")
    with pytest.raises(ValueError, match="nowhere"):
        generate_formats_page(sample_files)


def test_a_file_without_a_description_is_an_error(sample_files):
    new = sample_files / "runs" / "first" / "new.csv"
    new.touch()
    try:
        with pytest.raises(ValueError, match=r"runs/first/new\.csv"):
            generate_formats_page(sample_files)
    finally:
        new.unlink()


def test_a_description_without_a_file_is_an_error(sample_files, monkeypatch):
    monkeypatch.setitem(reference_formats.OTHER_FILES, "gone.png", "an image")
    with pytest.raises(ValueError, match=r"gone\.png"):
        generate_formats_page(sample_files)


def test_pages_contain_no_local_paths_or_sample_names():
    for name in reference.PAGES:
        assert not re.search(r"/(tmp|home|root)/|S001|FGFR3_", (FOLDER / name).read_text("utf-8")), name


def test_markdown_is_escaped_outside_code_and_links():
    assert escape_text("a <b> fold_N `c_<d>` [e](f.md) [g]") == "a &lt;b> fold\\_N `c_<d>` [e](f.md) \\[g\\]"
    assert format_table(["a"], [["b"]]) == ["| a |", "|---|", "| b |"]
    with pytest.raises(ValueError, match="bar"):
        format_table(["a"], [["b|c"]])
