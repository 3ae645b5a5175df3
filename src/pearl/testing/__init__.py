"""Test equipment for methods: the contract as checks, a simulated device, tiny networks and tasks.

```python
import pytest
from pearl.testing import checks, maker

@pytest.mark.parametrize("check", checks())
def test_contract(check):
    check(maker("my_method.py:MyMethod"))
```
"""

from pearl.testing.conformance import checks, maker

__all__ = ["checks", "maker"]
