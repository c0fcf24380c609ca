"""The list of mutants fits the sources and the tests that are there: what has moved has to move in the list, too."""

import ast

import pytest
from tests.mutants.run import ROOT, SOURCES, Mutant, read_list


@pytest.mark.parametrize("mutant", read_list(), ids=lambda mutant: f"{mutant.file}:{mutant.original}"[:80])
def test_a_mutant_changes_one_place_and_is_still_python(mutant: Mutant) -> None:
    source = (SOURCES / mutant.path).read_text()
    mutated = mutant.apply(source)
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))


@pytest.mark.parametrize("test", sorted({test for mutant in read_list() for test in mutant.tests}))
def test_named_tests_exist(test: str) -> None:
    assert (ROOT / "tests" / "unit" / test).exists()


def test_the_list_is_long_enough_and_names_nothing_twice() -> None:
    mutants = read_list()
    assert len(mutants) >= 150
    assert len(set(mutants)) == len(mutants)
