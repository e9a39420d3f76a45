"""Limits of requests and tokens a minute, for each API key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .http_errors import later


@dataclass(frozen=True)
class KeyLimits:
    """Requests and tokens (of prompts and answers) a minute; None: no limit."""

    requests: int | None = None
    tokens: int | None = None


class Bucket:
    """Token bucket: `level` is the remaining amount, refilled steadily up to `rate`, the limit per
    minute. A request's tokens are known only at its end, so the level may become negative."""

    def __init__(self, rate: int, now: float) -> None:
        self.rate, self.level, self._at = rate, float(rate), now

    def wait_s(self, need: float, now: float) -> float:
        """Refill the bucket; return the seconds until `need` is available, 0 if it is."""
        self.level = min(self.level + (now - self._at) * self.rate / 60, self.rate)
        self._at = now
        return max(need - self.level, 0) * 60 / self.rate


class RateLimits:
    """The limits of all keys, by the prefix-cache salt of each. Thread-safe."""

    def __init__(
        self, limits: Mapping[str, KeyLimits], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits, self._clock, self._lock = limits, clock, threading.Lock()
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def replace(self, limits: Mapping[str, KeyLimits]) -> None:
        """Replace the limits; keys with unchanged limits keep their buckets."""
        with self._lock:
            unchanged = {s for s, limit in limits.items() if self.limits.get(s) == limit}
            self._buckets = {k: b for k, b in self._buckets.items() if k[0] in unchanged}
            self.limits = limits

    def check(self, salt: str) -> None:
        """Subtract a request from its key's bucket. Refused (429) if the key's requests or tokens
        are used up."""
        with self._lock:
            buckets = {"requests": self._bucket(salt, "requests")}
            buckets["tokens"] = self._bucket(salt, "tokens")
            for kind, bucket in buckets.items():
                if bucket and (wait_s := bucket.wait_s(1, self._clock())):
                    message = f"this key has used its {bucket.rate} {kind} a minute; retry later"
                    raise later(429, "rate_limit_exceeded", message, wait_s)
            if requests := buckets["requests"]:
                requests.level -= 1

    def charge(self, salt: str, tokens: int) -> None:
        """Subtract the tokens of a request that ended from its key's bucket."""
        with self._lock:
            if bucket := self._bucket(salt, "tokens"):
                bucket.wait_s(0, self._clock())
                bucket.level -= tokens

    def _bucket(self, salt: str, kind: str) -> Bucket | None:
        rate = getattr(self.limits.get(salt), kind, None)
        if rate is None:
            return None
        return self._buckets.setdefault((salt, kind), Bucket(rate, self._clock()))
