"""A class that keeps state in its worker."""

from __future__ import annotations

from gpufn import enter, exit, gpu_function, method  # noqa: A004


@gpu_function(max_workers=1, idle_timeout=60)
class Counter:
    """Counts per name. The counts live as long as the worker, so max_workers is 1."""

    @enter
    def open(self) -> None:
        self.counts: dict[str, int] = {}

    @method
    def add(self, name: str, by: int = 1) -> int:
        self.counts[name] = self.counts.get(name, 0) + by
        return self.counts[name]

    @method
    def all(self) -> dict[str, int]:
        return self.counts

    @exit
    def close(self) -> None:
        print("counted", self.counts)  # the last line in `gpufn logs counter`
