"""Files that can be read at a sitting, and constructors whose calls can."""

import ast

from docs.make_imports import modules

MOST_LINES, MOST_PARAMETERS = 350, 12
# The users of other trainers know its parameters; five are ours.
WIDER = {"KTOTrainer": 17}


def test_no_file_is_too_long_to_hold_one_thing():
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules().items()}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_no_constructor_takes_more_parameters_than_its_calls_can_show():
    classes = [
        node
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    wide = {}
    for one in classes:
        for function in one.body:
            if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                parameters = len(function.args.args) - 1 + len(function.args.kwonlyargs)
                if parameters > WIDER.get(one.name, MOST_PARAMETERS):
                    wide[one.name] = parameters
    assert wide == {}
