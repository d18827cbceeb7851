"""The little Markdown of tapfm's own tables."""

from tapfm.report.markdown import blocks_of, inline


def test_tables_paragraphs_and_marks():
    text = (
        "| Model | AUC |\n|---|--:|\n| *TAPFM* | |\n| a \\| b | **0.9** |\n| c | <u>0.8</u> (0.1 to 0.9) |\n\n"
        "A note.\n- another\n\n![curves](curves.png)\n"
    )
    table, *notes = blocks_of(text)
    assert [(column.title, column.words) for column in table.columns] == [("Model", True), ("AUC", False)]
    assert table.rows[0].heading == "TAPFM"
    assert [cell.text for cell in table.rows[1].cells] == ["a | b", "0.9"]
    assert [row.cells[1].mark for row in table.rows[1:]] == ["best", "second"]
    assert [note.text for note in notes] == ["A note.", "another"]


def test_what_people_wrote_is_escaped_before_marks_are_shown():
    assert inline("**<script>** `x` & y") == "<strong>&lt;script&gt;</strong> <code>x</code> &amp; y"
