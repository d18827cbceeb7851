"""A small study by the command line gives the results of its golden file, from painted slides to predictions.

The commands are those of tools/version_scenario.py, fewer of them. A result that changes on purpose is written again:
python tools/write_golden.py commands
"""

from golden_cases import explain, make_items


def test_commands_give_the_results_of_the_golden_file():
    problem = explain("commands", make_items("commands"))
    assert not problem, problem
