"""How long ranks may stand still before their run is ended for it, by what they do and by the time limits of the config.

Who does nothing at all is given LEAST_S, and in proportion more where the limit of its phase has been raised: nobody can tell
storage, or a service, that will answer again from one that will not. Who is at work has most of that limit, and so has what may
be at work without showing it, but in steps that are like others before only some of those. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from packtrain.monitor.old.diagnosis import Diagnosis
from packtrain.monitor.old.heartbeat import WRITING, Phase
from packtrain.monitor.old.rank_state import RankState

LEAST_S = 45
"""Under a minute, so that a culprit is named within one."""
STEP_S, CHECKPOINT_S, JOIN_S = 600, 1800, 300
"""topology.step_timeout, topology.checkpoint_timeout and topology.join_timeout that nobody has set."""
TIMES = 10
_TO_ASK_S = 5
_TO_GIVE_UP_S = 60


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds that a collective operation of a step may take, and a checkpoint, while the others wait in one; and that all
    wait for each other at the start."""

    step_s: float = STEP_S
    checkpoint_s: float = CHECKPOINT_S
    join_s: float = JOIN_S

    def of(self, phase: Phase) -> float:
        """That of an operation which begins in `phase`."""
        return self.checkpoint_s if phase in WRITING else self.step_s

    def least_s(self, phase: Phase) -> float:
        """What a rank has that does nothing at all in `phase`."""
        usual = CHECKPOINT_S if phase in WRITING else STEP_S
        return min(most_s(self.of(phase)), LEAST_S * max(1.0, self.of(phase) / usual))

    @property
    def joining_s(self) -> float:
        """Of a rank that waits for the others to join it. It gives up by itself, after twice `join_s` a stage at most, and
        tells for whom it has waited and why: this is for who does not even come to that."""
        return 2 * self.join_s + _TO_GIVE_UP_S

    @property
    def shortest_s(self) -> float:
        """Of what ranks that do nothing have."""
        return min(self.least_s("checkpoint"), self.least_s("forward"))


def patience_s(found: Diagnosis, states: Sequence[RankState], limits: TimeLimits) -> float:
    """Seconds of standstill after which the diagnosis `found` holds: as long as one of its ranks works, it may be that it gets
    there. Most of its phase's limit then, and for ever where no collective waits for it: tokenising takes hours."""
    culprits = [one for one in states if one.rank in found.ranks] or states
    if found.cause in ("busy", "writing"):
        alone = any(one.alone for one in culprits)
        return math.inf if alone else min(most_s(limits.of(one.beat.phase)) for one in culprits if one.beat)
    return min(limit_s(one, limits) for one in culprits)


def limit_s(one: RankState, limits: TimeLimits) -> float:
    """Seconds that this rank may stand where it is: `least_s` where it does nothing at all.

    Else it may be that it goes on: TIMES usual steps, but `most_s` in what takes its own time (before training, first step,
    checkpoint, evaluation, results). Who waits for the others has no more time at a checkpoint than elsewhere: none of them
    writes. Whoever waits for tokenised data gives up by himself, and so does, with better words, who waits at the start.
    """
    beat = one.beat
    if beat is None:
        return most_s(limits.step_s)
    if one.does_nothing:
        return limits.least_s(beat.phase)
    if one.data_lock:
        return math.inf
    if one.waits and beat.phase == "join":
        return limits.joining_s
    most = most_s(limits.step_s if one.waits else limits.of(beat.phase))
    if not one.in_a_step:
        return most
    return min(most, max(limits.least_s(beat.phase), TIMES * beat.usual_s))


def most_s(timeout_s: float) -> float:
    """A little less than the time limit of collectives, so that the reason is told before those of the others end: nine
    tenths, or of a short one what leaves the time to ask the ranks."""
    return min(0.9 * timeout_s, max(timeout_s - _TO_ASK_S, timeout_s / 2))
