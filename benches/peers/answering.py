"""The worker's side of `Worker`: one JSON line in, one out, whatever else is printed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any


class Answers:
    """Takes stdout for answers; what libraries print goes to stderr from here on."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def serve(self, verbs: Mapping[str, Callable[..., Any]], ready: Any = "ready") -> None:
        self._say(ready)
        for line in sys.stdin:
            asked = json.loads(line)
            self._say(verbs[asked.pop("do")](**asked))

    def _say(self, value: Any) -> None:
        self._out.write(json.dumps(value) + "\n")
        self._out.flush()
