"""Members of the enumerations in which libraries name their backends."""

from __future__ import annotations

from typing import Any


def add_member(names: Any, member: Any, name: str, value: Any) -> Any:
    """Add a member to an enumeration; Python has no function for it.

    Args:
        names: the enumeration.
        member: an object of its class that is no member yet.
        name: name of the member.
        value: value of the member.

    Returns:
        The member.
    """
    member._name_, member._value_ = name, value
    member.__objclass__, member._sort_order_ = names, len(names)
    type.__setattr__(names, name, member)
    names._member_names_.append(name)
    names._member_map_[name] = member
    names._value2member_map_[value] = member
    return member
