"""Decode and verification steps that choose their own next tokens: on a GPU one graph launch each.

A step reads and writes tensors of the loop (tokens, lengths, active rows, random numbers, settings
of the draws), so the same recorded step serves every length and every sequence. The host reads the
tokens of a step while the next one is running.

A round of speculative decoding drafts k tokens, verifies them with the newest one, chooses the
token after each, keeps the accepted ones, and notes which rows go on, from which token and hidden
state. One recorded round for each k serves every length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from g4ir.model.decoder import HIDDEN
from g4ir.model.draft import NEXT_HIDDEN, TOKEN

Tensor = torch.Tensor

Embed = Callable[[Tensor], dict[str, Tensor]]
Step = Callable[[dict[str, Tensor]], Tensor]
#: (logits [B,1,vocab], random numbers f64[B], settings f64[B,4]) -> tokens i64[B]
Choose = Callable[[Tensor, Tensor, Tensor], Tensor]
Tensors = Mapping[str, Tensor]
#: runs a graph over the session's caches
Run = Callable[[Tensors], Tensors]


class TokenLoop:
    """A step over its own tensors. Not safe for use from several threads at once.

    `record` makes of the step what replays it: a CUDA graph, or the step itself. No row ends on the
    device: what a step appends to a sequence that had ended is dropped with it.
    """

    #: whether a chunk of a prompt should not run meanwhile; number of steps that one call should do
    exclusive, steps_per_call = False, 1

    def __init__(
        self,
        embed: Embed,
        step: Step,
        choose: Choose,
        batch: int,
        device: str,
        record: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        def zeros() -> Tensor:
            return torch.zeros(batch, dtype=torch.int64, device=device)

        self.embed, self.step, self.choose = embed, step, choose
        #: i64[B]: to be fed next; tokens that each row holds; 1 if the row takes the token
        self.tokens, self.lengths, self.active = zeros(), zeros(), zeros()
        self.uniforms = torch.zeros(batch, dtype=torch.float64, device=device)
        #: settings of the draws (sampling.py), f64[B,4]
        self.draws = torch.ones(batch, 4, dtype=torch.float64, device=device)
        #: f32[B]: 0, or NaN once an active row has had logits that are not finite
        self.flaws = torch.zeros(batch, device=device)
        self._record = record
        self._replay: Callable[[], None] | None = None
        self._unread: deque[_Result] = deque()

    def start(
        self,
        tokens: Tensor,
        lengths: Tensor,
        active: Tensor,
        draws: Tensor | None = None,
        stops: Sequence[Sequence[int]] = (),
    ) -> None:
        """Set the rows: tokens to feed, tokens held, bool of the active ones, settings of draws;
        `stops` are the host's to find."""
        state = (self.tokens, self.lengths, self.active)
        given = (tokens, lengths, active)
        if draws is not None:
            self.draws.copy_(draws)
        for own, t in zip(state, given, strict=True):
            own.copy_(t)
        if self._replay is None:
            # Recording runs the step. It writes to the cache slots that the first true step
            # writes again, with the same values.
            self._replay = self._record(self._once)
            for own, t in zip(state, given, strict=True):
                own.copy_(t)
        self.flaws.zero_()
        self._unread.clear()

    def _once(self) -> None:
        """Run one step, in place. An inactive row keeps its token and its caches; it is at position
        0, so that its attention has nothing to read."""
        feeds = self.embed(self.tokens[:, None])
        positions = (self.lengths * self.active)[:, None]
        feeds |= {"positions": positions, "lengths": self.active}
        logits = self.step(feeds)
        # One pass: the sum is finite if all of them are.
        sums = logits.sum((1, 2), dtype=torch.float32)
        chosen = self.choose(logits, self.uniforms, self.draws)
        runs = self.active > 0
        self.flaws += (sums * 0).where(runs, 0.0)
        self.lengths += self.active
        self.tokens.copy_(chosen.where(runs, self.tokens))

    def advance(self, count: int = 1, uniforms: Tensor | None = None) -> None:
        """Start one step, after `start`, and the copy of its tokens to the host; `uniforms`
        f64[1, B] are its random numbers."""
        assert self._replay and count == 1, "start comes first; a call is one step"
        if uniforms is not None:
            pinned = uniforms[0].pin_memory() if self.uniforms.is_cuda else uniforms[0]
            self.uniforms.copy_(pinned, non_blocking=True)
        self._replay()
        self._unread.append(_Result(self.tokens, self.flaws))

    @property
    def unread(self) -> int:
        """Number of steps whose tokens are still to be read."""
        return len(self._unread)

    def read(self) -> list[list[int | None]]:
        """Return each row's oldest unread token; None: its logits were not finite."""
        tokens, finite = self._unread.popleft().read()
        return [[token if good else None] for token, good in zip(tokens, finite, strict=True)]


class _Result:
    """Tokens of a step on their way to the host."""

    def __init__(self, tokens: Tensor, flaws: Tensor) -> None:
        self._all = torch.stack((tokens, flaws.isnan()))
        self._there: torch.cuda.Event | None = None
        if self._all.is_cuda:
            host = torch.empty(self._all.shape, dtype=self._all.dtype, pin_memory=True)
            self._all = host.copy_(self._all, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def read(self) -> tuple[list[int], list[bool]]:
        if self._there:
            self._there.synchronize()
        tokens, flaws = self._all.tolist()
        return tokens, [not flaw for flaw in flaws]


@dataclass(frozen=True)
class Round:
    """The tokens that a round gave each row, and for each whether all of its logits were finite."""

    tokens: list[list[int]]
    finite: list[bool]


class RoundLoop:
    """Rounds over tensors of their own. Not safe for use from several threads at once.

    `record` makes of a round what replays it: a CUDA graph, or the round itself. `last`: draft
    tokens have the position of the newest key, not their own. Rows end at their limits alone: what
    a round appends behind a stop token is dropped with its sequence.
    """

    def __init__(
        self,
        embed: Embed,
        draft: Run,
        verify: Run,
        choose: Choose,
        last: bool,
        device: str,
        record: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        self.embed, self.draft, self.verify, self.choose = embed, draft, verify, choose
        self._last, self._device, self._record = int(last), device, record
        self._replays: dict[int, Callable[[], None]] = {}
        self._made: dict[int, Tensor] = {}
        #: the loop's own copies of what `start` is given; tokens made; flaws as in TokenLoop
        self._own: dict[str, Tensor] = {}

    def start(
        self,
        tokens: Tensor,
        lengths: Tensor,
        limits: Tensor,
        active: Tensor,
        hidden: Tensor,
        draws: Tensor,
        uniforms: Tensor | None,
    ) -> None:
        """Set the rows. tokens i64[B]: the newest, which no cache holds yet; lengths: how many a
        row holds, and `limits`, how many it may hold; active bool[B]; hidden [B,1,H], the state
        that the newest token was chosen from; draws f64[B,4], the settings of the draws; uniforms
        f64[N,B], the random numbers of the next N tokens, or None."""
        batch = len(tokens)
        given = {
            "tokens": tokens,
            "lengths": lengths,
            "limits": limits,
            "active": active.long(),
            "hidden": hidden,
            "draws": draws,
            "uniforms": torch.zeros(1, batch).double() if uniforms is None else uniforms,
            "made": torch.zeros(batch, dtype=torch.int64),
            "flaws": torch.zeros(batch),
        }
        if {n: t.shape for n, t in given.items()} != {n: t.shape for n, t in self._own.items()}:
            self._own = {n: t.to(self._device, copy=True) for n, t in given.items()}
            self._replays.clear()  # which write to the old ones
        for name, t in given.items():
            self._own[name].copy_(t)

    @property
    def lengths(self) -> Tensor:
        """Tokens that each row holds, i64[B]."""
        return self._own["lengths"]

    @property
    def hidden(self) -> Tensor:
        """The state behind each row's newest token, [B,1,H]."""
        return self._own["hidden"]

    def run(self, count: int) -> Round:
        """Run a round that drafts `count` tokens."""
        if count not in self._replays:
            # Recording runs the round. What it writes to caches the true one writes again.
            kept = {name: t.clone() for name, t in self._own.items()}
            self._replays[count] = self._record(lambda: self._once(count))
            for name, t in kept.items():
                self._own[name].copy_(t)
        self._replays[count]()
        made = self._made[count].tolist()
        tokens = [row[: row[-2]] for row in made]
        return Round(tokens, [not row[-1] for row in made])

    def _once(self, count: int) -> None:
        """Run one round, in place. A row at rest takes no token; it is at position 0, so that its
        attention has nothing to read."""
        own, active = self._own, self._own["active"]
        held = own["lengths"] * active
        fed = (own["limits"] - own["lengths"]).clamp(max=count + 1) * active
        tokens = self._drafted(count, held)
        places = torch.arange(count + 1, device=held.device)
        feeds = self.embed(tokens) | {"positions": held[:, None] + places, "lengths": fed}
        found = self.verify(feeds)
        there = places < fed[:, None]
        # One pass: the sum is finite where all of them are.
        flaws = found["logits"].sum(2, dtype=torch.float32) * 0
        own["flaws"] += flaws.where(there, 0.0).sum(1)
        chosen = self._chosen(found["logits"])
        right = (chosen[:, :-1] == tokens[:, 1:]) & there[:, 1:]
        hit = right.long().cumprod(1).sum(1)
        taken = (hit + 1) * active
        self._keep(chosen, found[HIDDEN], hit, taken)
        ends = torch.stack((taken, own["flaws"].isnan().long()), 1)
        self._note(count, torch.cat((chosen, ends), 1))

    def _drafted(self, count: int, held: Tensor) -> Tensor:
        """Return the newest token and `count` drafted ones, i64[B, count + 1]."""
        last = (held - 1).clamp(min=0)[:, None]
        positions = last if self._last else held[:, None]
        feeds = {"positions": positions, "last": last, "written": held}
        tokens, hidden = [self._own["tokens"]], self._own["hidden"]
        for _ in range(count):
            row = self.embed(tokens[-1][:, None])["embeds"]
            made = self.draft({**feeds, "embeds": row, HIDDEN: hidden})
            hidden = made[NEXT_HIDDEN]
            tokens.append(made[TOKEN])
        return torch.stack(tokens, 1)

    def _chosen(self, logits: Tensor) -> Tensor:
        """Return what follows each token, i64[B,S], by the row's own number for that token."""
        numbers, at = self._own["uniforms"], self._own["made"]
        out = []
        for place in range(logits.shape[1]):
            index = (at + place).clamp(max=len(numbers) - 1)
            number = numbers.gather(0, index[None])[0]
            one = logits[:, place : place + 1].contiguous()
            out.append(self.choose(one, number, self._own["draws"]))
        return torch.stack(out, 1)

    def _keep(self, chosen: Tensor, hidden: Tensor, hit: Tensor, taken: Tensor) -> None:
        """Stand behind the last token that was right: the one chosen there is the newest."""
        own, runs = self._own, self._own["active"] > 0
        newest = chosen.gather(1, hit[:, None])[:, 0]
        state = hidden.gather(1, hit[:, None, None].expand(-1, 1, hidden.shape[2]))
        own["tokens"].copy_(newest.where(runs, own["tokens"]))
        own["hidden"].copy_(state.where(runs[:, None, None], own["hidden"]))
        own["lengths"] += taken
        own["made"] += taken
        own["active"] *= own["lengths"] < own["limits"]

    def _note(self, count: int, made: Tensor) -> None:
        if count not in self._made or self._made[count].shape != made.shape:
            self._made[count] = made.clone()
        else:
            self._made[count].copy_(made)
