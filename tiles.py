"""Which of the launches that give a product's bits is the fastest: configs/tiles.yaml, which
`python bench.py --tune` writes, and a rule for what it does not say.

The file is a table: device -> product -> T -> choice and its time. A file that is not such a table,
of whatever device, is refused before anything is loaded. An entry that says no launch of this build
is not an error but a line in the log: kernels change from one save to the next, every launch gives
the same bits, and the rule has one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import yaml

import config
from config import UserError
from launchers import Limits

FILE = config.CONFIGS / config.TILES
HEAD = """\
# The fastest launch of each product, by device and T; a number of rows goes by the next power of
# two. Written by `python bench.py --tune [--config FILE.yaml]`, read by tiles.py; all launches
# give the same bits. us: what the operation takes on cold weights behind a norm, as in a step;
# rule: the same as launched without this table, where that is another launch.
"""
log = logging.getLogger("kdtree")


def device_of(limits: Limits) -> str:
    """What launches depend on, as the file names it."""
    return f"{limits.architecture}, {limits.processors} processors"


@cache
def read(file: Path) -> dict:
    """{device: {product: {T: {"choice": .., "us": .., "rule": ..}}}}; empty without the file.
    Raises UserError."""
    if not file.is_file():
        return {}
    table = config.read_yaml(file, "a mapping of devices")
    for device, products in table.items():
        for product, of_rows in _mapping(file, products, "products", device):
            for rows, entry in _mapping(file, of_rows, "T", device, product):
                at = device, product, rows
                _mapping(file, entry, "choice and us", *at)
                if type(rows) is not int or rows < 1 or rows & (rows - 1):
                    raise _junk(file, "T to be a power of two", rows, *at)
                if not isinstance(entry.get("choice"), str):
                    raise _junk(file, "a choice", entry, *at)
                times = {key: us for key, us in entry.items() if key != "choice"}
                if not set(times) <= {"us", "rule"} or not all(map(_is_time, times.values())):
                    raise _junk(file, "choice, us and rule, both in microseconds", entry, *at)
    return table


def _is_time(us: object) -> bool:
    return type(us) in (int, float) and math.isfinite(us)  # of a difference: it may be below 0


def _mapping(file: Path, value: object, of: str, *where):
    if not isinstance(value, dict):
        raise _junk(file, f"a mapping of {of}", value, *where)
    return value.items()


def _junk(file: Path, expected: str, value: object, *where) -> UserError:
    return UserError(
        f"{file}: {': '.join(map(str, where))}: expected {expected}, got {value!r}; "
        "remove the entry, or the file, and run bench.py --tune"
    )


def write(file: Path, device: str, products: dict) -> None:
    """Put {product: {T: entry}} of a device in the place of what the file says of them."""
    table = dict(read(file))
    mine = dict(table.get(device, {}))
    for product, of_rows in products.items():
        mine[product] = dict(sorted((mine.get(product, {}) | of_rows).items()))
    table[device] = dict(sorted(mine.items()))
    text = yaml.safe_dump(table, sort_keys=False, width=200, default_flow_style=None)
    file.write_text(HEAD + text, encoding="utf-8")
    read.cache_clear()


class Tiles:
    """The choices of one device."""

    def __init__(self, limits: Limits, file: Path = FILE):
        self.file, self.device = file, device_of(limits)
        self.measured = read(file).get(self.device, {})
        self.chosen: dict[tuple[str, int], object] = {}

    def choose(self, product: str, rows: int, candidates: Iterable, rule: Callable):
        """Of the launches for so many rows the one that was measured as the fastest, else what
        rule() says. A candidate is as a string what the table calls it."""
        key = product, rows
        if key not in self.chosen:
            fastest = self._measured(product, rows, candidates)
            self.chosen[key] = rule() if fastest is None else fastest
        return self.chosen[key]

    def _measured(self, product: str, rows: int, candidates: Iterable):
        of_rows, at = self.measured.get(product, {}), 1 << (rows - 1).bit_length()
        if at not in of_rows:
            return None
        choice = of_rows[at]["choice"]
        found = next((c for c in candidates if str(c) == choice), None)
        if found is None:
            log.warning(
                "%s: %s: %s: %s: %s is no launch of it here; the rule's is taken: "
                "run bench.py --tune again", self.file, self.device, product, at, choice
            )  # fmt: skip
        return found
