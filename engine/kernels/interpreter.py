"""Runs a plan: the one compiled call of a step.

A plan is rows of 24 bytes: kernel address, arguments address, and the number of tokens above which a barrier follows the row.
Every worker walks all rows; each kernel gives it its share. Worker 0 is the caller: it posts the plan, runs it, and returns after
a last barrier. The others stay here, spinning a while and then parked in the kernel of the operating system, until the next plan;
where that cannot be done, they return and wait in Python.
"""

from __future__ import annotations

from numba import int32, int64

from ...quant.jit.fields import ArgumentBlock, view
from ...quant.jit.memory import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_c,
    call_kernel,
    cycles,
    load_i64,
    pause,
    store_i64,
)
from ...quant.jit.piece import inline
from .structs import ARRIVED, GENERATION, JOB, PLAN_ROW, SETTINGS, SETTINGS_AT, SLEEPERS

FIELDS = SETTINGS

_WAIT, _WAKE = 128, 129  # FUTEX_WAIT and FUTEX_WAKE, both with FUTEX_PRIVATE_FLAG
_EVERYONE = 1 << 30


def build():
    Settings = ArgumentBlock(SETTINGS)

    @inline
    def wake(settings, address):
        if settings.syscall:
            call_c(settings.syscall, settings.futex, address, _WAKE, _EVERYONE, 0)

    @inline
    def barrier(sync, settings, workers):
        if workers == 1:
            return
        generation = atomic_load(sync + GENERATION)
        if atomic_add(sync + ARRIVED, int32(1)) == workers - 1:
            atomic_store(sync + ARRIVED, int32(0))
            atomic_add(sync + GENERATION, int32(1))
            if atomic_load(sync + SLEEPERS) > 0:
                wake(settings, sync + GENERATION)
            return
        turns = 0
        while atomic_load(sync + GENERATION) == generation:
            turns += 1
            pause()
            if turns > settings.spin:
                if settings.syscall:  # sleeps only while the generation is still the old one
                    atomic_add(sync + SLEEPERS, int32(1))
                    call_c(settings.syscall, settings.futex, sync + GENERATION, _WAIT, int64(generation), 0)
                    atomic_add(sync + SLEEPERS, int32(-1))
                elif settings.yield_:
                    call_c(settings.yield_, 0, 0, 0, 0, 0)

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
                call_c(settings.syscall, settings.futex, sync + JOB, _WAIT, int64(seen), 0)

    def kernel(sync, worker, workers):
        settings = view(Settings, sync + SETTINGS_AT)
        seen = int32(0)
        while True:
            if worker == 0:
                if workers > 1 and settings.resident:
                    atomic_add(sync + JOB, int32(1))
                    wake(settings, sync + JOB)
            elif settings.resident:
                seen = next_job(sync, settings, seen)
            if settings.run == 0:
                return
            row, tokens, profile = settings.plan, settings.tokens, settings.profile
            for i in range(settings.rows):
                if profile and worker == 0:
                    store_i64(profile + 8 * i, cycles())
                call_kernel(load_i64(row), load_i64(row + 8), worker, workers)
                if tokens > load_i64(row + 16):
                    barrier(sync, settings, workers)
                row += PLAN_ROW
            if profile and worker == 0:
                store_i64(profile + 8 * settings.rows, cycles())
            barrier(sync, settings, workers)
            if worker == 0 or not settings.resident:
                return

    return kernel
