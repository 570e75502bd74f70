"""What the kernels and the engine that calls them must agree on: structs, sizes, offsets. No numba here: a warm start imports only this."""

from __future__ import annotations

# ---- the step: what changes from one run of a plan to the next -----------------------------------------------------------

STEP = "tokens ids positions sequences table"
"""tokens     number of tokens in this step
ids        address of their int32 ids
positions  address of their int64 positions
sequences  number of sequences they belong to; the tokens of a sequence lie together, in order
table      address of a SEQUENCE row for each
"""

SEQUENCE = "first count start pages splits"
"""first   index of the sequence's first token in the step
count   its tokens in the step
start   position of the first
pages   address of its block table: int64 page numbers. What lies wholly behind a layer's window may be any number
splits  parts of SPLIT positions in which a lone token's attention is computed side by side, or 0: in one piece
"""

SEQUENCE_BYTES = 8 * len(SEQUENCE.split())

# ---- activation panels (panels.py) -------------------------------------------------------------------------------------

TOKENS = 6
"""Tokens of a full panel; the last panel of a step is 1, 2, 4 or 6 wide."""

BLOCK = 32
"""Columns of a record."""

RECORD = {"int8": 44, "f32": 128}
"""Bytes per token and block of 32 columns, by kind of panel."""


def padded_tokens(tokens: int) -> int:
    """Tokens for which buffers need room: the last panel may be wider than its tokens."""
    return -(-tokens // TOKENS) * TOKENS


def panel_bytes(kind: str, tokens: int, columns: int) -> int:
    """Bytes of the panels of `tokens` tokens."""
    return padded_tokens(tokens) * -(-columns // BLOCK) * RECORD[kind]


# ---- the KV cache (rope_store.py, attention.py, cache_layouts/) ----------------------------------------------------------

PAGE = 32
"""Positions of a page."""

SPLIT = 256
"""Positions after which the sums of attention are folded: fixed, so that results do not depend on who computes which part."""

ROWS = 6
"""Rows (queries that share a KV head) that attention computes together."""

WRITER_ROOM = 128
"""Bytes of room that a layout of the cache has while it writes a key or a value."""

ATTENTION_FEATURES = ("window", "soft_cap", "sinks")
"""What attention can have beyond the plain kind; named in a kernel's parameters, so that a model without them runs code without them."""


def padded_head(head_size: int) -> int:
    """Dimensions of a head in whole vectors of 16."""
    return -(-head_size // 16) * 16


def part_bytes(value_size: int) -> int:
    """Bytes of a partial result of attention: maximum, sum, padding, values."""
    return 64 + 4 * padded_head(value_size)


def attention_scratch(key_size: int, value_size: int) -> int:
    """Bytes per worker: queries, scores of a split, running and partial results."""
    return ROWS * (4 * padded_head(key_size) + 4 * SPLIT + 2 * part_bytes(value_size)) + 64


def rope_scratch(key_size: int) -> int:
    """Bytes per worker: the room of a layout's writer, and a rotated key."""
    return WRITER_ROOM + 4 * key_size


# ---- the interpreter (interpreter.py) ------------------------------------------------------------------------------------

UNIT = 32
"""Rows of a matrix that are claimed together: a record of the panels that the next product reads."""

WHOLE = 1 << 14
"""Parts into which rows of a plan that are claimed are cut, whatever their size: a claim is a run of these."""


def span(first: int, last: int) -> int:
    """The parts first..last - 1 of WHOLE, as the third argument of a kernel whose units are claimed (see panels.units)."""
    return first | last << 16


# Each on a cache line of its own: workers write them while others read.
DONE, PHASE, JOB, SLEEPERS, GATE, PARKED, SETTINGS_AT = 0, 64, 128, 192, 256, 320, 384
"""Byte offsets in the synchronization block: parts of the phase that are done; the phase, int64; plans posted; workers asleep while others
work; workers inside the plan, plus OPEN while more may come in; workers parked between plans; SETTINGS."""

OPEN = 1 << 30

SETTINGS = "plan rows tokens base run spin yields patience resident syscall futex yield_ profile job"
"""plan, rows  address and number of rows
tokens      tokens of the step
base        the plan's first phase
run         1: run the plan; 0: the workers are to return for good
spin        turns that a worker spins for others before it lets them have the processor
yields      turns after that in which it offers the processor, before it sleeps
patience    turns that a worker spins for the next plan before it parks
resident    1: workers stay in compiled code between plans (needs futex)
syscall     address of the C library's syscall, or 0
futex       number of the futex system call
yield_      address of sched_yield or the like
profile     address of int64 cycle counts, one per row plus one, filled by worker 0; or 0
job         where workers are not resident: number of the plan that they are called for
"""

CLAIMS_AT = SETTINGS_AT + 128
"""Offset of the claims: for each worker, CLAIM_BYTES apart, an int64 of phase (upper 32 bits), first and last part that nobody has yet."""

CLAIM_BYTES = 128
"""Two cache lines, as processors fetch them in pairs."""


def sync_bytes(workers: int) -> int:
    """Bytes of the synchronization block."""
    return CLAIMS_AT + CLAIM_BYTES * workers


PLAN_ROW = 32
"""Bytes of a row of a plan: kernel address, arguments address, the number of tokens above which a barrier follows, and the units that
are claimed, or 0."""

ALWAYS, MANY, NEVER = 0, 1, 1 << 40
"""Thresholds: a barrier after the row always, only with more than one token, or never."""

# ---- comparing logits (logit_errors.py) ----------------------------------------------------------------------------------

LOGIT_RUN = 1024
"""Logits summed in float32; the sums of the runs are then added in float64."""

LOGIT_SUMS = 6
"""Sums of each run."""

# ---- experts (route.py, group_tokens.py, gather_panels.py, expert_*.py) --------------------------------------------------

ROUTE_BYTES = 12
"""A choice of a token: int32 expert, int32 place among the tokens of that expert, float32 weight. A token's follow each other by rank, the
expert with the highest score first."""

GROUP = "start count"
"""The tokens that one expert computes. start: the slot of its first, a multiple of TOKENS; slots are rows of buffers, and panels of the
expert begin where those of `start` tokens would end. count: how many."""

GROUP_BYTES = 8 * len(GROUP.split())


def expert_slots(tokens: int, experts: int, used: int) -> int:
    """Slots for which buffers need room: each expert's tokens are padded to whole panels."""
    choices = tokens * used
    return padded_tokens(choices + (TOKENS - 1) * min(experts, choices))


def route_scratch(experts: int) -> int:
    """Bytes per worker: which experts were chosen already."""
    return -(-4 * experts // 128) * 128
# ---- choosing tokens (sample_*.py) -----------------------------------------------------------------------------------------

SAMPLE = (
    "logits mask touched ids bias seen said raw repetition:f32 frequency:f32 presence:f32 "
    "wants top_k top_p:f64 log_min_p:f64 scale:f32 uniform:f64"
)
"""What is asked of a row of logits.

logits      address of float32[columns, padded to 16]
mask        address of uint32[columns / 32]: bit i % 32 of word i / 32 says that token i may be chosen; 0: all may
touched     number of tokens with a bias or a penalty, and addresses of what there is for each: ids (int32), bias (float32), seen
            (int32: > 0 if the repetition penalty applies), said (int32: times in the answer), raw (float32: the logit as it was, out)
repetition, frequency, presence   the penalties
wants       WANT_ flags
top_k       0: all
log_min_p   natural logarithm of min-p; -inf: all
scale       1 / temperature
uniform     the random number, in [0, 1)
"""

SAMPLE_BYTES = 8 * len(SAMPLE.split())

WANT_SUM, WANT_SPREAD, WANT_BEST, WANT_DRAW = 1, 2, 4, 8
"""Flags: the sum of weights at temperature 1; the sums at the temperature, for a draw from all tokens; the best SAMPLE_BEST tokens;
a draw, instead of the largest logit."""

SAMPLED = "status id logit:f32 largest:f32 total:f64 best"
"""What comes of it, before the lists of the best: int32[SAMPLE_BEST] ids, float32[SAMPLE_BEST] logits, largest first.

status   SAMPLED_ values; with 1 and 2 nothing else is there
id       the token that was chosen; logit: its logit, with bias and penalties
largest  the largest logit; total: sum of all tokens' weights at temperature 1, relative to it
best     length of the lists
"""

SAMPLED_NOT_FINITE, SAMPLED_NOTHING, SAMPLED_WIDE = 1, 2, 3
"""A logit is NaN or +inf; no token is left; or the list of the best is too short to say what is kept: all but the id is there."""

SAMPLE_BEST = 256
SAMPLED_LISTS = 64
"""Where the lists begin in a result."""
SAMPLED_BYTES = SAMPLED_LISTS + 8 * SAMPLE_BEST

SAMPLE_RUN = 1024
"""Columns of a unit of work."""
SAMPLE_RUN_BYTES = 128
"""What is known of a run: the largest logit of each lane (16 float32), whether there is a NaN (the largest magnitude's bits), the sums
of weights at temperature 1 and at the row's (float64)."""

SAMPLE_FOUND = 63 * SAMPLE_BEST + 1024
"""Room for tokens that may be among the best: see sample_choose.py."""
SAMPLE_SCRATCH = 64 + 3 * 4 * SAMPLE_FOUND + 2 * 4 * (SAMPLE_BEST + 16)
"""Bytes per worker."""
