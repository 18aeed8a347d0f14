import pytest

from tvmify.compiler.kernels.common.choice import (
    Choices,
    choose,
    choosing,
    is_collecting,
    is_measured,
    is_strict,
    once,
)


def test_the_first_candidate_is_the_choice_of_the_rule():
    assert choose("work", [3, 1, 2]) == 3


def test_a_measured_winner_is_chosen():
    with choosing(Choices(measured={"work": "1"})):
        assert choose("work", [3, 1, 2]) == 1
        assert choose("other work", [3, 1, 2]) == 3


def test_stale_winner_is_ignored():
    with choosing(Choices(measured={"work": "9"})):
        assert choose("work", [3, 1, 2]) == 3


def test_choices_record_their_workloads():
    with choosing(Choices()) as collected:
        choose("work", [3, 1])
    assert collected.candidates == {"work": ["3", "1"]}


@pytest.mark.parametrize("accuracy", ["default", "strict"])
def test_accuracy_holds_inside_only(accuracy):
    with choosing(Choices(accuracy=accuracy)):
        assert is_strict() == (accuracy == "strict")
    assert not is_strict()


def test_is_asking_and_is_measured():
    assert not is_collecting()
    assert not is_measured()
    with choosing(Choices(is_collecting=True)):
        assert is_collecting()
        assert not is_measured()
    with choosing(Choices(measured={"work": "1"})):
        assert not is_collecting()
        assert is_measured()


def test_a_compilation_finds_the_same_only_once():
    asked = []

    def find(size: int, name: str) -> tuple[int, str, bool]:
        asked.append(size)
        return size, name, is_strict()

    with choosing(Choices()):
        assert once(find, 2, "a") == once(find, 2, "a") == (2, "a", False)
        assert once(find, 3, "a") == (3, "a", False)
    with choosing(Choices(accuracy="strict")):
        assert once(find, 2, "a") == (2, "a", True)
    assert asked == [2, 3, 2]
