"""Rounds of speculative decoding on the device: on a GPU one graph launch each.

A round drafts k tokens, verifies them with the newest one, chooses the token after each, keeps the
accepted ones, and notes which rows go on, from which token and hidden state. It reads and writes
tensors of the loop alone, so one recorded round for each k serves every length. The host reads the
tokens of a round and sets how many the next one drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from g4ir.model.decoder import HIDDEN
from g4ir.model.draft import NEXT_HIDDEN, TOKEN

from .token_loop import Choose, Embed

Tensors = Mapping[str, torch.Tensor]
#: runs a graph over the session's caches
Run = Callable[[Tensors], Tensors]


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
        self._made: dict[int, torch.Tensor] = {}
        #: the loop's own copies of what `start` is given; tokens made; flaws as in TokenLoop
        self._own: dict[str, torch.Tensor] = {}

    def start(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        limits: torch.Tensor,
        active: torch.Tensor,
        hidden: torch.Tensor,
        draws: torch.Tensor,
        uniforms: torch.Tensor | None,
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
    def lengths(self) -> torch.Tensor:
        """Tokens that each row holds, i64[B]."""
        return self._own["lengths"]

    @property
    def hidden(self) -> torch.Tensor:
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

    def _drafted(self, count: int, held: torch.Tensor) -> torch.Tensor:
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

    def _chosen(self, logits: torch.Tensor) -> torch.Tensor:
        """Return what follows each token, i64[B,S], by the row's own number for that token."""
        numbers, at = self._own["uniforms"], self._own["made"]
        out = []
        for place in range(logits.shape[1]):
            index = (at + place).clamp(max=len(numbers) - 1)
            number = numbers.gather(0, index[None])[0]
            one = logits[:, place : place + 1].contiguous()
            out.append(self.choose(one, number, self._own["draws"]))
        return torch.stack(out, 1)

    def _keep(
        self, chosen: torch.Tensor, hidden: torch.Tensor, hit: torch.Tensor, taken: torch.Tensor
    ) -> None:
        """Stand behind the last token that was right: the one chosen there is the newest."""
        own, runs = self._own, self._own["active"] > 0
        newest = chosen.gather(1, hit[:, None])[:, 0]
        state = hidden.gather(1, hit[:, None, None].expand(-1, 1, hidden.shape[2]))
        own["tokens"].copy_(newest.where(runs, own["tokens"]))
        own["hidden"].copy_(state.where(runs[:, None, None], own["hidden"]))
        own["lengths"] += taken
        own["made"] += taken
        own["active"] *= own["lengths"] < own["limits"]

    def _note(self, count: int, made: torch.Tensor) -> None:
        if count not in self._made or self._made[count].shape != made.shape:
            self._made[count] = made.clone()
        else:
            self._made[count].copy_(made)
