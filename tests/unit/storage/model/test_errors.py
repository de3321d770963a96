"""Errors that come in groups: ours are told one by one, others are not hidden."""

import pytest

from storage.model.errors import ConflictError, TidemarkError, UnavailableError, leaves, ours_alone


def test_errors_of_nested_groups_come_in_order() -> None:
    one, other, third = UnavailableError("one"), ConflictError("other"), TidemarkError("third")
    group = ExceptionGroup("outer", [one, ExceptionGroup("inner", [other, third])])
    assert leaves(group) == ours_alone(group) == [one, other, third]


@pytest.mark.parametrize(
    "group", [ExceptionGroup("", [OSError()]), ExceptionGroup("", [OSError(), ConflictError("")])]
)
def test_a_group_with_an_error_of_somebody_else_is_raised_as_it_is(
    group: ExceptionGroup[Exception],
) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        ours_alone(group)
    assert raised.value is group
