"""`tapfm predict --split` selects the slides of one split of a table."""

import pytest
from slide_files import section, write_slide

from tapfm.cohort.table_options import DEFAULT_TABLE_OPTIONS
from tapfm.errors import CohortError, InputError
from tapfm.prediction.inputs import read_sources
from tapfm.tasks.catalog import target_kinds


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    (folder / "slides").mkdir()
    lines = ["slide_id,path,split,FGFR3"]
    for number, split in enumerate(("train", "test", "val", "test", "")):
        write_slide(folder / "slides" / f"s{number}.svs", section(300, 300, seed=number), mpp=0.5)
        lines.append(f"s{number},slides/s{number}.svs,{split},{number % 2}")
    (folder / "split.csv").write_text("\n".join(lines) + "\n")
    return folder


def slide_ids(requested):
    return [slide.row.slide_id for slide in requested.slides]


def test_slides_of_the_split_are_selected_with_their_labels(folder):
    requested = read_sources([folder / "split.csv"], DEFAULT_TABLE_OPTIONS, target_kinds(["FGFR3"]), "test")
    assert slide_ids(requested) == ["s1", "s3"]
    assert [slide.labels for slide in requested.slides] == [{"FGFR3": 1}, {"FGFR3": 1}]
    assert slide_ids(read_sources([folder / "split.csv"], DEFAULT_TABLE_OPTIONS, target_kinds(["FGFR3"]))) == [
        "s0",
        "s1",
        "s2",
        "s3",
        "s4",
    ]


def test_slides_without_a_table_are_always_included(folder):
    requested = read_sources(
        [folder / "split.csv", folder / "slides" / "s0.svs"], DEFAULT_TABLE_OPTIONS, target_kinds(["FGFR3"]), "test"
    )
    assert slide_ids(requested) == ["s1", "s3", "s0"]


def test_unknown_or_empty_split_is_an_error(folder, tmp_path):
    with pytest.raises(InputError, match="tests") as raised:
        read_sources([folder / "split.csv"], DEFAULT_TABLE_OPTIONS, [], "tests")
    assert all(name in raised.value.hint for name in ("train", "val", "test"))
    with pytest.raises(InputError, match="--split"):
        read_sources([folder / "slides"], DEFAULT_TABLE_OPTIONS, [], "test")
    table = tmp_path / "train.csv"
    table.write_text(f"slide_id,path,split\ns0,{folder}/slides/s0.svs,train\n")
    with pytest.raises(CohortError, match="split test") as raised:
        read_sources([table], DEFAULT_TABLE_OPTIONS, [], "test")
    assert "train" in raised.value.hint
    table.write_text(f"slide_id,path\ns0,{folder}/slides/s0.svs\n")
    with pytest.raises(CohortError) as raised:
        read_sources([table], DEFAULT_TABLE_OPTIONS, [], "test")
    assert "tapfm split" in raised.value.hint
