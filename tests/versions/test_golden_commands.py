"""The results of a small study on the command line are those of its golden file.

The commands are a part of tools/version_scenario.py. After an intended change, update the golden file:
python tools/write_golden.py commands
"""

from golden_cases import create_items, describe_differences


def test_command_results_equal_the_golden_file():
    problem = describe_differences("commands", create_items("commands"))
    assert not problem, problem
