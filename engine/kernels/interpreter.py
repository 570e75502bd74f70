"""Runs a plan: the one compiled call of a step.

A plan is rows (structs.PLAN_ROW) of kernel address, arguments address, the number of tokens above which a barrier follows the row, and
the units of work that may be claimed. The rows up to a barrier, or to the end, are a phase:

- Rows with units are claimed together. Each worker has a share of the units, takes it piece by piece, runs all those rows on a piece,
  and then helps itself to what others have not begun. Outputs are independent, so who computes what changes no bit.
- A row without units before the barrier is dealt in as many parts as there are workers. A worker takes the part of its own number
  first, then those that nobody has begun, and everything that belongs to the part's number with it.
- Rows without units that no barrier follows come first in a phase, and every worker does them for itself: once, before its first
  claimed piece, or with each part of a row that is dealt.

A phase ends when all its parts are done, not when all workers have come. So a worker that has lost its processor is waited for only if
it lost it inside a part; otherwise it finds later that the plan has gone on without it, and goes where the others are.

Claims, one atomic word for each worker's share: phase, first and last part that nobody has yet. A word of the phase before stands for the
whole share, so nothing is reset between phases. Words change by compare and swap, so a late worker cannot take what is not of its phase.

Worker 0 is the caller: it posts the plan, works, and returns when all is done and nobody else is inside. The others stay here, spinning
a while and then parked in the kernel of the operating system, until the next plan; where that cannot be done, they return and wait in
Python. Spinning for others is short: then the processor is offered to them, and then waited for in the operating system, which can so
move a worker that something else displaced.
"""

from __future__ import annotations

from numba import int32, int64

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import (
    atomic_add,
    atomic_load,
    atomic_load_i64,
    atomic_store,
    atomic_store_i64,
    atomic_swap_if,
    call_c,
    call_kernel,
    cycles,
    load_i64,
    pause,
    store_i64,
)
from ...quant.jit.piece import inline
from .structs import (
    CLAIM_BYTES,
    CLAIMS_AT,
    DONE,
    GATE,
    JOB,
    OPEN,
    PARKED,
    PHASE,
    PLAN_ROW,
    SETTINGS,
    SETTINGS_AT,
    SLEEPERS,
    UNIT,
    WHOLE,
)

FIELDS = SETTINGS

PIECES = 8
"""A share is claimed in halves of what is left of it, but in no more than so many pieces of equal size would be: the last ones are
what a worker may have to wait for, and each costs a claim."""

_WAIT, _WAKE = 128, 129  # FUTEX_WAIT and FUTEX_WAKE, both with FUTEX_PRIVATE_FLAG
_EVERYONE = 1 << 30
_LOW, _HALF = 0xFFFFFFFF, 0xFFFF

assert UNIT == 32 and WHOLE <= _HALF


def build():
    Settings = ArgumentBlock(SETTINGS)

    # ---- waiting -------------------------------------------------------------------------------------------------------

    @inline
    def wake(settings, address):
        if settings.syscall:
            call_c(settings.syscall, settings.futex, address, _WAKE, _EVERYONE, 0)

    @inline
    def rest(sync, settings, turns, address, value):
        """A turn of waiting while the int32 at the address has that value: spins, then offers the processor, then sleeps."""
        pause()
        if turns > settings.spin:
            if settings.syscall and turns > settings.spin + settings.yields:
                atomic_add(sync + SLEEPERS, int32(1))
                call_c(settings.syscall, settings.futex, address, _WAIT, value, 0)
                atomic_add(sync + SLEEPERS, int32(-1))
            elif settings.yield_:
                call_c(settings.yield_, 0, 0, 0, 0, 0)

    # ---- claims --------------------------------------------------------------------------------------------------------

    @inline
    def claim(word, phase, first, last, least, steal):
        """Takes parts of a share whose parts were first..last - 1, from its front, or from its end to steal. Returns first | last << 16
        of what was taken, or -1: there is nothing left, or the phase is over."""
        while True:
            old = atomic_load_i64(word)
            tag = (old >> 32) & _LOW
            low, high = first, last
            if tag == phase & _LOW:
                low, high = (old >> 16) & _HALF, old & _HALF
            elif tag != (phase - 1) & _LOW:
                return int64(-1)
            if low >= high:
                return int64(-1)
            count = high - low
            if count >= 2 * least:
                count = max(least, count // 2)
            mine = low
            if steal:
                mine = high - count
                high = mine
            else:
                low += count
            if atomic_swap_if(word, old, ((phase & _LOW) << 32) | (low << 16) | high):
                return mine | (mine + count) << 16

    @inline
    def finish(sync, settings, phase, done, whole):
        """Counts parts that are done; the last ones end the phase."""
        if atomic_add(sync + DONE, int32(done)) + done == whole:
            atomic_store(sync + DONE, int32(0))
            atomic_store_i64(sync + PHASE, phase + 1)
            if atomic_load(sync + SLEEPERS) > 0:
                wake(settings, sync + PHASE)

    # ---- rows ----------------------------------------------------------------------------------------------------------

    @inline
    def call(row, profile, worker, third):
        """Runs a row. profile: address of its cycle count, or 0."""
        start = cycles() if profile else 0
        call_kernel(load_i64(row), load_i64(row + 8), int32(worker), int32(third))
        if profile:
            store_i64(profile, load_i64(profile) + cycles() - start)

    @inline
    def call_all(plan, first, last, profile, worker, third):
        for i in range(first, last):
            call(plan + i * PLAN_ROW, profile + 8 * i if profile else 0, worker, third)

    @inline
    def alone(settings):
        for i in range(settings.rows):
            row = settings.plan + i * PLAN_ROW
            third = WHOLE << 16 if load_i64(row + 24) > 0 else 1
            call(row, settings.profile + 8 * i if settings.profile else 0, 0, third)

    @inline
    def run_phase(sync, settings, plan, first, own, stop, phase, units, profile, worker, workers):
        """Rows first..stop - 1, of which those from `own` on are shared, as one phase: until there is nothing left to do in it."""
        whole = WHOLE if units > 0 else workers
        # No piece is smaller than a unit of the rows with most units.
        least = max((WHOLE + units - 1) // units, WHOLE // (workers * PIECES)) if units > 0 else 1
        prepared, done, k = False, 0, 0
        while True:
            owner = (worker + k) % workers
            share, end = whole * owner // workers, whole * (owner + 1) // workers
            span = claim(sync + CLAIMS_AT + owner * CLAIM_BYTES, phase, share, end, least, k > 0)
            if span >= 0:
                if units > 0:
                    if not prepared:
                        call_all(plan, first, own, profile, worker, workers)
                        prepared = True
                    call_all(plan, own, stop, profile, worker, span)
                else:
                    for part in range(span & _HALF, span >> 16):
                        call_all(plan, first, stop, profile, part, workers)
                done += (span >> 16) - (span & _HALF)
                continue
            if done > 0:
                finish(sync, settings, phase, done, whole)
                done = 0
            k += 1
            if k >= workers or atomic_load_i64(sync + PHASE) != phase:
                return

    @inline
    def run(sync, settings, worker, workers):
        """Phase after phase, from the one that the others are at."""
        plan, rows, tokens, phase = settings.plan, settings.rows, settings.tokens, settings.base
        profile = settings.profile if worker == 0 else 0
        first = 0
        while first < rows:
            own, stop, units = first, first, 0
            while True:  # where the phase ends, and where what is shared begins
                row = plan + stop * PLAN_ROW
                units = max(units, load_i64(row + 24))
                stop += 1
                if tokens > load_i64(row + 16) or stop == rows:
                    break
                if units == 0:
                    own = stop
            if atomic_load_i64(sync + PHASE) == phase:
                run_phase(sync, settings, plan, first, own, stop, phase, units, profile, worker, workers)
                turns = 0
                while atomic_load_i64(sync + PHASE) == phase:
                    turns += 1
                    rest(sync, settings, turns, sync + PHASE, phase & _LOW)
            first = stop
            phase += 1

    # ---- plans ---------------------------------------------------------------------------------------------------------

    @inline
    def lead(sync, settings, workers):
        """What the caller does: it lets the others in, works, lets nobody in any more, and waits until they are out."""
        store_i64(sync + SETTINGS_AT + 8 * _BASE, atomic_load_i64(sync + PHASE))
        atomic_add(sync + GATE, int32(OPEN))
        atomic_add(sync + JOB, int32(1))
        if atomic_load(sync + PARKED) > 0:
            wake(settings, sync + JOB)
        run(sync, settings, 0, workers)
        atomic_add(sync + GATE, int32(-OPEN))
        turns = 0
        while True:
            inside = atomic_load(sync + GATE)
            if inside == 0:
                return
            turns += 1
            rest(sync, settings, turns, sync + GATE, int64(inside))

    @inline
    def follow(sync, settings, worker, workers):
        """What the others do, unless they come too late."""
        if atomic_add(sync + GATE, int32(1)) >= OPEN:
            run(sync, settings, worker, workers)
        if atomic_add(sync + GATE, int32(-1)) == 1 and atomic_load(sync + SLEEPERS) > 0:
            wake(settings, sync + GATE)

    @inline
    def next_job(sync, settings, seen):
        turns = 0
        while True:
            job = atomic_load(sync + JOB)
            if job != seen:
                return job
            turns += 1
            pause()
            if turns > settings.patience:
                atomic_add(sync + PARKED, int32(1))
                call_c(settings.syscall, settings.futex, sync + JOB, _WAIT, int64(seen), 0)
                atomic_add(sync + PARKED, int32(-1))

    def kernel(sync, worker, workers):
        settings = view(Settings, sync + SETTINGS_AT)
        if worker == 0:
            if settings.run == 0:
                atomic_add(sync + JOB, int32(1))
                wake(settings, sync + JOB)
                return
            start = cycles()
            if workers == 1:
                alone(settings)
            else:
                lead(sync, settings, workers)
            if settings.profile:
                store_i64(settings.profile + 8 * settings.rows, cycles() - start)
            return
        if settings.resident == 0:
            while 0 < (settings.job - atomic_load(sync + JOB)) & _LOW < OPEN and settings.run:  # called before the plan is posted
                call_c(settings.yield_, 0, 0, 0, 0, 0)
            if settings.run:
                follow(sync, settings, worker, workers)
            return
        seen = int32(0)
        while True:
            seen = next_job(sync, settings, seen)
            if settings.run == 0:
                return
            follow(sync, settings, worker, workers)

    return kernel


_BASE = SETTINGS.split().index("base")
