"""Faults planted in the connector, and the search for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from judge import Violation
from schedules import Schedule

MOST_SCHEDULES = 3000
Plant = Callable[[pytest.MonkeyPatch], None]


class PlantedFaults(dict[str, tuple[Plant, tuple[str, ...]]]):
    """Each under its name: what plants it, and the rules one of which must break first."""

    def fault(self, *rules: str) -> Callable[[Plant], Plant]:
        """Registers a fault under its name, with the rules one of which must break first."""

        def register(plant: Plant) -> Plant:
            self[plant.__name__] = plant, rules
            return plant

        return register

    def require_found(
        self,
        name: str,
        monkeypatch: pytest.MonkeyPatch,
        schedule: Callable[[int], Schedule] = Schedule,
    ) -> None:
        """Plants the fault; the search must see it, and by the rule that it breaks."""
        plant, rules = self[name]
        plant(monkeypatch)
        found = first_violation(schedule)
        assert found is not None, f"{MOST_SCHEDULES} schedules did not see it"
        seed, violation = found
        print(f"schedule {seed}: {violation}")
        assert str(violation).startswith(rules)


def first_violation(schedule: Callable[[int], Schedule]) -> tuple[int, Violation] | None:
    """The first schedule that breaks a rule, and the rule."""
    for seed in range(MOST_SCHEDULES):
        try:
            schedule(seed).run()
        except Violation as violation:
            return seed, violation
    return None
