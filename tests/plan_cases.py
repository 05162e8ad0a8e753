"""What the tests of plans on the emulator and on a GPU share."""

from typing import Any

from mlaflash import oracle
from mlaflash.lab.plan_inputs import judge


def expect(result: tuple[Any, Any], arguments: dict[str, Any]) -> None:
    """Fail unless a result in NumPy is the oracle's."""
    q = arguments["q"]
    comparison = judge(result, oracle.mla_verify(**arguments), (q[0] if isinstance(q, tuple) else q).dtype.name)
    assert comparison.passed, comparison
