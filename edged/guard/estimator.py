"""What the guard learns online: how long a step takes and how warm work makes the chip. Pure.

Both are recursive least squares with a prior; the heat model's offset walks, so that weather, a
blocked fan or a busy CPU show up in it. Small matrices are plain tuples: the daemon has no numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

Vector = tuple[float, ...]
Matrix = tuple[Vector, ...]


# --- step time -----------------------------------------------------------------------------------

_STEP_NOISE = 0.04  # relative; jitter and mixed batches
_STEP_WALK = 0.003  # share of its first width a weight may wander per observation


@dataclass(frozen=True)
class StepModel:
    """Seconds of a decode step: fixed part + part per sequence, each with a share that grows
    with x = highest gear / clock and one that does not: p0 + p1 b + p2 x + p3 x b.

    chunk: seconds at x = 1 of a prefill chunk, fixed and per token; None = not seen.
    """

    weights: Vector = (0.0, 0.0, 0.2, 0.01)  # a guess until the first step is seen
    spread: Matrix = ()
    widths: Vector = ()
    observed: int = 0
    chunk: Vector | None = None
    chunk_spread: Matrix = ()
    chunk_widths: Vector = ()

    def step_s(self, batch: float, x: float) -> float:
        p = self.weights
        return max(1e-4, p[0] + p[1] * batch + (p[2] + p[3] * batch) * x)

    def share(self, batch: float, x: float) -> float:
        """Of the step that grows with the batch: how busy the cubes are."""
        p = self.weights
        return min(1.0, max(0.0, (p[1] + p[3] * x) * batch / self.step_s(batch, x)))

    def chunk_s(self, tokens: float, x: float) -> float:
        """Seconds of one prefill chunk; 0 while none has been seen."""
        if self.chunk is None:
            return 0.0
        return max(0.0, self.chunk[0] + self.chunk[1] * tokens) * x

    def seen(self, batch: float, x: float, step_s: float) -> StepModel:
        """Learn from steps of mean size `batch` that took step_s each."""
        features = (1.0, batch, x, x * batch)
        if not self.observed:
            unit = step_s / x
            guess = (0.0, 0.0, 0.9 * unit, 0.1 * unit / batch)
            widths = (0.3 * unit, 0.03 * unit, 0.5 * unit, 0.1 * unit)
            return replace(self, weights=guess, widths=widths, spread=_diagonal(widths), observed=1)
        noise = (_STEP_NOISE * step_s) ** 2
        weights, spread = _least_squares(
            self.weights, self.spread, self.widths, features, step_s, noise
        )
        weights = (*weights[:2], max(weights[2], 0.0), max(weights[3], 0.0))
        return replace(self, weights=weights, spread=spread, observed=self.observed + 1)

    def seen_chunks(self, tokens: float, x: float, chunk_s: float) -> StepModel:
        """Learn from prefill chunks of mean size `tokens` that took chunk_s each."""
        unit_s = chunk_s / x
        if self.chunk is None:
            guess = (0.3 * unit_s, 0.7 * unit_s / tokens)
            widths = (0.4 * unit_s, 0.4 * unit_s / tokens)
            return replace(self, chunk=guess, chunk_widths=widths, chunk_spread=_diagonal(widths))
        noise = (_STEP_NOISE * unit_s) ** 2
        chunk, spread = _least_squares(
            self.chunk, self.chunk_spread, self.chunk_widths, (1.0, tokens), unit_s, noise
        )
        chunk = (max(chunk[0], 0.0), max(chunk[1], 1e-6))
        return replace(self, chunk=chunk, chunk_spread=spread)


def _diagonal(widths: Vector) -> Matrix:
    size = range(len(widths))
    return tuple(tuple(widths[i] ** 2 if i == j else 0.0 for j in size) for i in size)


def _least_squares(
    weights: Vector, spread: Matrix, widths: Vector, features: Vector, value: float, noise: float
) -> tuple[Vector, Matrix]:
    """One recursive step; old knowledge fades, but never to less than there was at first."""
    reach = [sum(s * f for s, f in zip(row, features, strict=True)) for row in spread]
    total = noise + sum(f * r for f, r in zip(features, reach, strict=True))
    error = value - sum(w * f for w, f in zip(weights, features, strict=True))
    gains = [r / total for r in reach]
    new_weights = tuple(w + g * error for w, g in zip(weights, gains, strict=True))
    lines = [
        [s - g * r for s, r in zip(row, reach, strict=True)]
        for row, g in zip(spread, gains, strict=True)
    ]
    for index, width in enumerate(widths):
        lines[index][index] += (_STEP_WALK * width) ** 2
    return new_weights, _capped(lines, [width * width for width in widths])


def _capped(lines: list[list[float]], caps: list[float]) -> Matrix:
    """No variance above its cap; rows and columns shrink together, so it stays a covariance."""
    for index, cap in enumerate(caps):
        if lines[index][index] > cap:
            factor = math.sqrt(cap / lines[index][index])
            for other in range(len(lines)):
                lines[index][other] *= factor
                lines[other][index] *= factor
    return tuple(tuple(line) for line in lines)


# --- heat ----------------------------------------------------------------------------------------

TAUS_S = (1.6, 2.5, 4.0, 6.3, 10.0, 25.0, 60.0)  # time constants tried side by side
_OFFSET_WALK_C = 0.1  # °C per square-root second: weather, sinks that warm slowly
_GAIN_WALK = 0.0005  # of the prior's width, per square-root second
_INPUT_NOISE_C2 = 0.02  # °C^2 per second: what is known of the input is rough
_JUMP = 3.5  # standard deviations of surprise that mean something has changed ...
_JUMP_LEAST_C = 0.8  # ... and at least this plus most of a sensor step
_FIT_PART, _FIT_LEAD = 0.01, 0.05  # memory of a fit; how much better another one must be
_CALM_S = 20.0  # after which an input counts as steady
_STIR_C = 1.5  # change of input, in °C of rise, that teaches something about the gains
_SLOW_S = 60.0  # mean input is taken over this
_GAIN_GUESS = (10.0, 90.0)  # °C at full clock and duty: from clock, from work (pessimistic)
_GAIN_WIDTH = (6.0, 50.0)
_OFFSET_WIDTH_C = 5.0
_GAIN_LEAST = (0.3, 2.0)


@dataclass(frozen=True)
class HeatInput:
    """What heats: busy share x clock ratio, and busy share x clock ratio^2 x share of work."""

    clock: float
    work: float


_NO_HEAT = HeatInput(0.0, 0.0)


@dataclass(frozen=True)
class HeatFilter:
    """One time constant's view. means: (temperature now, offset = where an idle chip settles,
    °C per clock input, °C per work input); spread: their covariance."""

    tau_s: float
    means: Vector
    spread: Matrix
    misfit: float = 1.0  # moving mean of squared surprises in units of what was expected
    fit: float = 0.0  # minus log likelihood, moving mean while the input moved
    span_s: float = 1.0  # of the last prediction

    @property
    def temperature_c(self) -> float:
        return self.means[0]

    @property
    def offset_c(self) -> float:
        return self.means[1]

    def rise_c(self, heat: HeatInput) -> float:
        """Steady °C above the offset."""
        return self.means[2] * heat.clock + self.means[3] * heat.work

    def drifted_c(self, from_c: float, dt_s: float, heat: HeatInput) -> float:
        """Where from_c would be after dt_s of this input, by the means alone."""
        end_c = self.offset_c + self.rise_c(heat)
        return end_c + (from_c - end_c) * math.exp(-dt_s / self.tau_s)

    def predicted(self, dt_s: float, heat: HeatInput) -> HeatFilter:
        """After dt_s of this input, without a reading."""
        keep = math.exp(-dt_s / self.tau_s)
        row = (keep, 1 - keep, (1 - keep) * heat.clock, (1 - keep) * heat.work)
        p = self.spread
        reach = [sum(r * p[i][j] for i, r in enumerate(row)) for j in range(4)]
        corner = sum(r * reach[i] for i, r in enumerate(row)) + _INPUT_NOISE_C2 * dt_s
        walks = (_OFFSET_WALK_C**2, *((_GAIN_WALK * w) ** 2 for w in _GAIN_WIDTH))
        caps = [1e4, 400.0, *(w * w for w in _GAIN_WIDTH)]
        lines = [[corner, reach[1], reach[2], reach[3]]]
        for i in (1, 2, 3):
            line = [reach[i], p[i][1], p[i][2], p[i][3]]
            line[i] += walks[i - 1] * dt_s
            lines.append(line)
        temperature_c = sum(r * m for r, m in zip(row, self.means, strict=True))
        means = (temperature_c, *self.means[1:])
        spread = _capped(lines, caps)
        return HeatFilter(self.tau_s, means, spread, self.misfit, self.fit, dt_s)

    def corrected(self, reading_c: float, noise: float, stirred: bool) -> HeatFilter:
        """After a reading with this variance. stirred: the input has moved lately; only then
        the gains learn. A great surprise is taken for a change of the surroundings at once."""
        surprise = reading_c - self.means[0]
        p = self.spread
        total = p[0][0] + noise
        square = min(surprise * surprise / total, 50.0)
        misfit = self.misfit + 0.02 * (square - self.misfit)
        fit = self.fit
        if stirred:
            fit += _FIT_PART * (square + math.log(total) - fit)
        if abs(surprise) > max(_JUMP * math.sqrt(total), _JUMP_LEAST_C + 2.0 * math.sqrt(noise)):
            return replace(self._jumped(surprise), misfit=misfit)
        gains = [p[i][0] / total for i in range(4)]
        if not stirred:
            gains[2] = gains[3] = 0.0
        means = [m + g * surprise for m, g in zip(self.means, gains, strict=True)]
        lines = [[p[i][j] - gains[i] * p[0][j] for j in range(4)] for i in range(4)]
        for i in (2, 3):
            for j in (0, 1):
                lines[i][j] = lines[j][i]
        return HeatFilter(self.tau_s, _possible(means), _frozen(lines), misfit, fit, self.span_s)

    def _jumped(self, surprise: float) -> HeatFilter:
        """The offset has moved, and the temperature has followed since the last reading."""
        moved_c = surprise / (1 - math.exp(-self.span_s / self.tau_s))
        moved_c = max(-25.0, min(25.0, moved_c))
        means = (self.means[0] + surprise, self.means[1] + moved_c, *self.means[2:])
        p = [list(line) for line in self.spread]
        p[1][1] = min(400.0, p[1][1] + moved_c * moved_c / 4)
        return replace(self, means=means, spread=_frozen(p))

    def shifted(self, offset_c: float) -> HeatFilter:
        """A change that was announced (the CPU engine starts, the fan moves)."""
        p = [list(line) for line in self.spread]
        p[1][1] = min(400.0, p[1][1] + offset_c * offset_c + 4.0)
        means = (self.means[0], self.means[1] + offset_c, *self.means[2:])
        return replace(self, means=means, spread=_frozen(p))


def _frozen(lines: list[list[float]]) -> Matrix:
    return tuple(tuple(line) for line in lines)


def _possible(means: list[float]) -> Vector:
    return (
        means[0],
        means[1],
        max(means[2], _GAIN_LEAST[0]),
        max(means[3], _GAIN_LEAST[1]),
    )


@dataclass(frozen=True)
class HeatModel:
    """Filters of several time constants side by side; the one that fits best speaks.

    usual: the mean input of the last minute; calm_s: how long the input has stayed near it.
    """

    filters: tuple[HeatFilter, ...]
    best: int = 3
    usual: HeatInput = _NO_HEAT
    calm_s: float = _CALM_S

    @classmethod
    def at(cls, temperature_c: float) -> HeatModel:
        """Nothing known but one reading: taken for the idle temperature, which errs on the
        careful side when the chip is still warm from work."""
        means = (temperature_c, temperature_c, *_GAIN_GUESS)
        spread = _diagonal((1.0, _OFFSET_WIDTH_C, *_GAIN_WIDTH))
        return cls(tuple(HeatFilter(tau_s, means, spread) for tau_s in TAUS_S))

    @property
    def now(self) -> HeatFilter:
        return self.filters[self.best]

    def predicted(self, dt_s: float, heat: HeatInput) -> HeatModel:
        """After dt_s of this input, without a reading."""
        filters = tuple(f.predicted(dt_s, heat) for f in self.filters)
        moved_c = abs(self.now.rise_c(heat) - self.now.rise_c(self.usual))
        calm_s = 0.0 if moved_c > _STIR_C else self.calm_s + dt_s
        part = min(1.0, dt_s / _SLOW_S)
        usual = HeatInput(
            self.usual.clock + part * (heat.clock - self.usual.clock),
            self.usual.work + part * (heat.work - self.usual.work),
        )
        return HeatModel(filters, self.best, usual, calm_s)

    def corrected(self, reading_c: float, noise: float) -> HeatModel:
        stirred = self.calm_s < _CALM_S
        filters = tuple(f.corrected(reading_c, noise, stirred) for f in self.filters)
        fits = [f.fit for f in filters]
        leader = min(range(len(fits)), key=fits.__getitem__)
        best = leader if fits[leader] < fits[self.best] - _FIT_LEAD else self.best
        return replace(self, filters=filters, best=best)

    def stirred(self) -> HeatModel:
        """Another clock heats in another mixture, even at the same temperature: learn from it."""
        return replace(self, calm_s=0.0)

    def shifted(self, offset_c: float) -> HeatModel:
        return replace(self, filters=tuple(f.shifted(offset_c) for f in self.filters))
