"""The reference is what the code gives now, and a name that nobody explains is an error."""

import re
from pathlib import Path
from typing import Annotated

import pytest
import reference
import reference_commands
import reference_configuration
import reference_formats
import typer
from reference_commands import commands_page
from reference_configuration import configuration_page, recipe_text
from reference_formats import formats_page, meanings_of
from reference_lab import make_lab
from reference_meanings import Format
from reference_readers import Entry
from reference_text import prose, table

from tapfm.config.loading import all_settings
from tapfm.config.settings import RunConfig
from tapfm.study.presets import PRESETS

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
OUTDATED = "docs/reference is not what the code gives now; write it anew: make docs"


def lines_of(name):
    return (FOLDER / name).read_text("utf-8").splitlines()


@pytest.fixture(scope="module")
def files(tmp_path_factory, one_thread):  # noqa: ARG001 - for the whole module
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAPFM_CACHE", str(tmp_path_factory.mktemp("cache")))
        make_lab(folder)
    return folder


def test_the_page_of_commands_is_current():
    assert lines_of("commands.md") == commands_page().splitlines(), OUTDATED


def test_the_page_of_settings_is_current():
    assert lines_of("configuration.md") == configuration_page().splitlines(), OUTDATED


def test_the_page_of_files_is_current(files):
    assert lines_of("file-formats.md") == formats_page(files).splitlines(), OUTDATED


def test_all_pages_are_written_and_no_others():
    assert {path.name for path in FOLDER.iterdir()} == set(reference.PAGES)


def test_the_tool_says_what_is_outdated_and_writes_it_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reference, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["reference.py", "--only", "commands.md", "--check"])
    with pytest.raises(SystemExit, match="1"):
        reference.main()
    assert "commands.md is not what the code gives now" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("sys.argv", ["reference.py", "--only", "commands.md"])
    with pytest.raises(SystemExit, match="0"):
        reference.main()
    assert (tmp_path / "commands.md").read_text("utf-8") == commands_page()


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
        tapfm sing song.txt --hum

        It takes
        a while.
        """

    @app.command(hidden=True)
    def whisper() -> None:
        """Sing so that nobody hears it."""

    return app


def test_a_command_is_on_the_page_by_existing(monkeypatch):
    monkeypatch.setattr(reference_commands, "app", one_command(help="Without / with words."))
    page = commands_page()
    assert "| [`tapfm sing`](#tapfm-sing) | Sing a song. |" in page
    assert "\n    tapfm sing song.txt --hum\n" in page
    assert "\nIt takes a while.\n" in page
    assert "| `SONG` or `LIST` | yes | What to sing &lt;loud>. |" in page
    assert "| `--verses N` | whole number, 1 to 9 | `3` | How many. |" in page
    assert "| `--voice` | text, repeatable | all | Who. |" in page
    assert "| `--hum` `--words` | switch | - | Without / with words. |" in page
    assert "whisper" not in page


def test_an_option_without_help_is_refused(monkeypatch):
    monkeypatch.setattr(reference_commands, "app", one_command())
    with pytest.raises(ValueError, match="tapfm sing: --hum has no help"):
        commands_page()


def test_an_exit_code_without_a_meaning_is_refused(monkeypatch):
    monkeypatch.delitem(reference_commands.EXIT_CODES, 3)
    with pytest.raises(ValueError, match="3"):
        commands_page()


def test_every_setting_is_on_the_page():
    page = configuration_page()
    for section, *key in all_settings():
        has_keys = section not in ("recipe", "seed")
        assert f"### [{section}]" in page if has_keys else f"| `{section}` |" in page
        if key:
            part = page.partition(f"### [{section}]\n")[2].partition("\n### ")[0]
            assert f"| `{key[0]}` |" in part
    assert all(f"| `{name}` |" in page for name in PRESETS)


def test_a_setting_without_words_is_refused(monkeypatch):
    monkeypatch.setattr(RunConfig.model_fields["seed"], "description", None)
    with pytest.raises(ValueError, match="seed has no description"):
        configuration_page()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adaptation.tau", "`1.0`; reference: `0.1`"),
        ("schedule.epochs", "`20`; finetune and fixed: `50`"),
        ("schedule.first_cycle", "`10`; reference: as `schedule.epochs`"),
        ("augmentation.flip", "`0.5`"),
        ("optimiser.encoder_lr", "[by encoder](#what-depends-on-the-encoder)"),
    ],
)
def test_what_recipes_set_is_said(name, said):
    assert recipe_text(name) == said


def test_what_cannot_be_said_of_recipes_is_refused(monkeypatch):
    monkeypatch.setattr(
        reference_configuration,
        "values_of",
        lambda recipe, method, _encoder, _epochs=None: {"a.b": 1 if recipe == "paper" else len(method)},
    )
    with pytest.raises(ValueError, match=r"a\.b"):
        recipe_text("a.b")


def test_a_name_without_a_meaning_is_refused():
    with pytest.raises(ValueError, match="nobody says what these mean: unheard_of"):
        meanings_of(Format("x.csv", "x", "A table."), [Entry("slide_id"), Entry("unheard_of")], set())


def test_a_meaning_without_a_name_is_refused():
    with pytest.raises(ValueError, match=r"x\.csv does not have: gone"):
        meanings_of(Format("x.csv", "x", "A table.", {"gone": "it was here"}), [Entry("slide_id")], set())


def test_a_common_meaning_that_no_file_has_is_refused(files, monkeypatch):
    monkeypatch.setitem(reference_formats.COMMON, "nowhere", "in no file")
    with pytest.raises(ValueError, match="nowhere"):
        formats_page(files)


def test_a_file_that_nobody_describes_is_refused(files):
    new = files / "runs" / "first" / "new.csv"
    new.touch()
    try:
        with pytest.raises(ValueError, match=r"Nobody says what these are: runs/first/new\.csv"):
            formats_page(files)
    finally:
        new.unlink()


def test_a_description_of_what_nothing_writes_is_refused(files, monkeypatch):
    monkeypatch.setitem(reference_formats.OTHERS, "gone.png", "a picture")
    with pytest.raises(ValueError, match=r"Nothing writes: gone\.png"):
        formats_page(files)


def test_pages_name_no_place_of_the_machine_they_were_made_on():
    for name in reference.PAGES:
        assert not re.search(r"/(tmp|home|root)/|S001|FGFR3_", (FOLDER / name).read_text("utf-8")), name


def test_words_come_out_as_they_are():
    assert prose("a <b> fold_N `c_<d>` [e](f.md) [g]") == "a &lt;b> fold\\_N `c_<d>` [e](f.md) \\[g\\]"
    assert table(["a"], [["b"]]) == ["| a |", "|---|", "| b |"]
    with pytest.raises(ValueError, match="bar"):
        table(["a"], [["b|c"]])
