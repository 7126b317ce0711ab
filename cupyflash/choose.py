"""From a problem to the kernels that compute it: one literal table for each pass.

A row lists tilings in the order of their speed; the first one of which blocks_per_sm blocks fit in the device's shared
memory is taken. Speeds beside them are those of an H200 relative to FlashAttention-2 in PyTorch 2.11, bfloat16, 16k
tokens, 2048 / head_dim heads, full mask, lengths 1024 / 8192; tilings that lost, so that nobody tries them again:

====================================  ===========  ==========================================================
forward, head_dim                     FA2 = 1      tried
====================================  ===========  ==========================================================
64: 128x64, 4 warps, 2 stages, Q reg  1.11 / 1.14  128x128 1.07/1.12; 64x64 1.01/1.03; 8 warps 0.97/0.99
128: 128x64, 4 warps, 2 stages        1.09 / 1.10  1 stage 1.06/1.07; 128x32 1.04/1.06; 8 warps of 16 rows with
                                                   Q in registers 0.84/0.90 (shared memory: each K and V
                                                   fragment feeds half as many products)
256: 64x64, 4 warps of all rows and a 1.09 / 1.11  warps of 16 rows 1.03/1.05 (V is read four times); copies not
quarter of the columns of out                      spread over the products 1.02/1.04; 128x64 with 8 warps of 16 rows
                                                   0.97/1.01; 64x32, 2 stages 0.91/0.92
backward, head_dim (queries x keys)
64: 32x128, 4 warps, P in registers   1.12 / 1.13  64x64 1.01/0.98; 128x128, 8 warps 0.98/0.95; 64x128, 8 warps
                                                   0.96/0.94, with P through shared memory 0.94/0.92
128: 64x128, 8 warps as 4 x 2         1.05 / 1.02  8 x 1, P in registers 0.98/0.94; 64x64, 4 warps 1.00/0.95; 32x128
                                                   0.90/0.85; 64x64, two blocks a multiprocessor 0.80/0.76
256: 64x64, 8 warps, dq as 4 x 2      0.99 / 0.97  dq as 2 x 4 1.00/0.98, but spills; 32x64 0.85/0.81
====================================  ===========  ==========================================================
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from dataclasses import replace

from . import counts
from .checks import MASK_TILE
from .problem import Problem
from .spec import (
    BIAS_TYPES,
    BackwardSpec,
    BiasGradientSpec,
    BiasSumSpec,
    ForwardSpec,
    HopperBackwardSpec,
    HopperBiasGradientSpec,
    HopperForwardSpec,
    HopperKeysSpec,
    HopperQueriesSpec,
    MaskWordsSpec,
    ModGradientSpec,
    PrepareSpec,
    SegmentsSpec,
    SinkSpec,
    Variant,
)

PATHS = ("sm80", "sm90")

# head_dim up to: (block_q, block_k, warps, out_warps_q, stages, blocks_per_sm, q_in_registers), ... The first rows were
# chosen by measurement on an H200, the smaller ones by their fit in the shared memory of other devices.
FORWARD = {
    64: ((128, 64, 4, 4, 2, 2, True), (64, 64, 4, 4, 1, 2, True)),
    96: ((128, 64, 4, 4, 2, 2, False), (64, 64, 4, 4, 1, 2, False), (64, 64, 4, 4, 1, 1, False)),
    128: ((128, 48, 4, 4, 1, 2, False), (128, 32, 4, 4, 1, 2, False), (64, 64, 4, 4, 1, 1, False)),
    192: ((64, 64, 4, 1, 1, 2, False), (64, 32, 4, 4, 1, 2, False), (64, 32, 4, 4, 1, 1, False)),
    256: (
        (64, 64, 4, 1, 1, 2, False),
        (128, 64, 8, 8, 1, 1, False),
        (64, 64, 4, 4, 1, 1, False),
        (64, 32, 4, 4, 1, 1, False),
    ),
}
# The same, first choice of kernels without options on Ampere to Hopper: faster, with no register left for one.
FORWARD_PLAIN = {128: ((128, 64, 4, 4, 2, 2, False),)}

# The same for a changed score, softcap or ALiBi, and for dropout: what the rows above spill with it.
FORWARD_CHANGED = {128: ((128, 32, 4, 4, 1, 2, False),)}
FORWARD_ALIBI = FORWARD_CHANGED | {64: ((128, 64, 4, 4, 2, 2, False),)}
FORWARD_DROPPED = {
    64: ((128, 64, 4, 4, 2, 2, False),),
    96: ((128, 48, 4, 4, 2, 2, False),),
    128: ((64, 64, 4, 4, 2, 2, False), (64, 64, 4, 4, 1, 2, False)),
}
FORWARD_WITH_BITS = FORWARD | {256: (*FORWARD[256], (64, 16, 4, 4, 1, 1, False))}  # of what is kept, beside 64 KiB
FORWARD_PACKED = FORWARD_DROPPED | {256: ((64, 32, 4, 4, 1, 2, False),)}  # and for packed sequences

# The same for these and a block mask, whose tiles must divide its own.
FORWARD_DROPPED_BLOCKS = FORWARD_DROPPED | {96: ((128, 32, 4, 4, 2, 2, False),)}

# The same for a bias and a mask, whose addresses take registers: 0.22 of the speed of Hopper's without, at 128. With 64
# keys 96 and 128 spill for both in float16, with 32 keys 256.
FORWARD_LOGITS = {
    64: ((64, 64, 4, 4, 2, 2, True),),
    96: ((64, 32, 4, 4, 2, 2, False),),
    128: ((64, 32, 4, 4, 2, 2, False),),
    192: ((64, 32, 4, 4, 1, 2, False),),
    256: ((64, 16, 4, 4, 1, 2, False),),
}
FORWARD_MIXED = {64: ((64, 32, 4, 4, 2, 2, True),)}  # and what spills with these: functions of the user as well

# Hopper, head_dim up to: (block_k, cluster, teams, groups, q_slots, slots) of full and of banded problems, of up to
# SHORT keys and of more; the fields are those of HopperForwardSpec. Relative to cuDNN 9.19 in the same run, timed by
# events among kernels that draw as much power (benchmarks/side_by_side.json has less), bfloat16, lengths 1024 / 4096,
# full then causal:
#    64: 1.07 1.16, 1.18 1.15    96: 1.12 1.31, 1.12 1.39   128: 1.06 1.11, 1.16 1.24
#   192: 1.19 1.27, 1.20 1.34   256: 1.14 1.19, 1.20 1.36
# What binds, at 8192 (ncu): the power (700 W), which leaves 1.55 to 1.75 GHz of 1.98. 256: tensor cores busy 93 % of
# the cycles; 128: 80 %; 64: tensor cores and exponentials both 59 %, nothing alone: each warpgroup takes its products,
# its maximum and its exponentials one after the other. There 7 % fewer instructions changed no cycle.
# Tried at 64, 128 and 256; a figure is the ratio to cuDNN at that length, or what changed, in samples of 10 ms:
#   out stored by the consumers, Q loaded late   0.98, 0.97, 0.92 at 512 full, 0.85, 0.93, 0.99 causal: loads, products
#                                                and stores of a tile followed each other
#   Q and out in slots of all groups together    256: 0.94 at 512
#   causal tiles dealt one by one                5 to 25 % less: unequal work; by the hardware, 5 to 15 % less
#   all warpgroups on one tile                   64, causal, 512: 0.89. At 2.5 tiles of keys the first scores and the
#                                                last values, which nothing overlaps, weigh most; teams overlap theirs
#   a team for each warpgroup                    0.78 to 0.86: K and V are read twice as often
#   first scores of the next tile of queries     3 % more at 512, 1 to 5 % less from 2048 on
#   overlapped with the last product of this
#   K and V by multicast to two blocks           full: 4 % more at 512, equal at 1024, 2 % less at 4096; 64 and causal:
#                                                less. Arrivals that release to the cluster cost 35 %: each is a fence
#   no turns at the tensor cores                 0.79 at 64
#   176 keys at 128; 80 or 96 at 256             5 to 10 % less
#   the maximum of half a tile among the          64: 2 % less; 128: 4 % less at 512, 1 % more at 4096; 256: equal
#   exponentials of the other half
#   a quarter of the exponentials of 64 by a     8 to 10 % less: it is the power that binds, not the unit
#   polynomial of the fourth degree
#   Q in registers, at 128                       1 to 3 % less
#   the exponentials held before the wait for    64: 1 to 4 % less, 128: 5 to 8 %; eighths to halves of them: 1 to 6 %;
#   P V, behind which the compiler moves them    none, the wait first: 64: 2 % less, 128: 10 %
#   descriptors made before the turn             1 % less
#   80, 96, 192 keys at 64; 64 or 96 keys or     5 to 25 % less
#   three groups at 128; 5 slots, 2 of Q at 128
#   causal tiles of all heads by length, dealt   all blocks end together, but every round reads K and V from memory: in
#   back and forth                               samples of 10 ms 2 to 7 % more from 8192 on, 10 % less at 512. In those
#                                                of side_by_side.py, 30 ms, beside FlashAttention-4 and on another GPU:
#                                                equal to 9 % less from 4096 on, where full masks had 2 % less unchanged
HOPPER_FORWARD = {
    64: ((128, 1, 1, 3, 6, 6), (128, 1, 1, 3, 6, 6), (64, 1, 2, 2, 4, 4), (128, 1, 1, 3, 6, 6)),
    96: ((96, 1, 1, 3, 6, 4),) * 4,
    128: ((128, 2, 1, 2, 4, 4), (128, 1, 1, 2, 4, 4), (128, 1, 1, 2, 4, 4), (128, 1, 1, 2, 4, 4)),
    192: ((64, 1, 1, 2, 4, 5), (80, 1, 1, 2, 4, 4), (64, 1, 1, 2, 4, 5), (80, 1, 1, 2, 4, 4)),
    256: ((64, 2, 1, 2, 3, 4), (64, 1, 1, 2, 3, 4), (64, 1, 1, 2, 3, 4), (64, 1, 1, 2, 3, 4)),
}
# The same for what spills with the rows above: softcap, and softcap that does not bound the weights.
HOPPER_FORWARD_SOFTCAP = {64: ((128, 1, 1, 3, 6, 6),) * 4}
HOPPER_FORWARD_TIGHT = {64: ((96, 1, 1, 3, 6, 6),) * 4}
# And dropout, and a changed score of packed or narrow rows.
HOPPER_FORWARD_SPARE = {64: ((128, 1, 1, 2, 4, 6),) * 4, 96: ((96, 1, 1, 2, 4, 4),) * 4}
# What slows the softmax down beside the products (H200; a loop in one warpgroup, m64n128k16 without pause in another,
# cycles of a warp's instruction alone and then beside it):
#   FFMA, FADD, FMUL         1.1, 1.35; each takes 0.95 of a cycle from the tensor cores, which wait for the registers
#   exp2                     8, 10       takes nothing
#   max, select, pack, LOP3, IMAD, pairs of float16   2.1, 3.7; an integer sum 1.1, 1.9: take nothing
# In the loop at 128 a warp gets an instruction into its scheduler every two to three cycles, whatever its kind: what is
# added counts in full, unless it runs beside the exponentials, in one piece with them. Tried, 128, 8192, of the speed
# without the option, in samples of 20 to 30 ms:
#   softcap     0.60: a vote for every 16 columns; 0.72: its series in five instructions, exponents made relative to
#               the maximum at once; 0.83: and no maximum where the cap bounds it; 0.70: with one branch in between.
#               Beside plain calls that follow sums, 0.76 with five instructions, 0.79 with four
#   dropout     0.51: a call of Philox for 4 weights; 0.26: bits of 32 weights by two idle warps; 0.51: by those who
#               compute, while the scores are on their way, who wait little; 0.56 to 0.65: beside the exponentials.
#               Where those had 0.52, 0.44 by four more warps that do nothing else: 1470 cycles for 155 instructions.
#               Beside plain calls that follow sums 0.59, and 0.62 (causal 0.63, 0.58) where these do, too, and calls of
#               Philox share rounds, which left a warp about 760 instructions for a tile, 320 of them dropout's
#   mbarriers   waits with a limit of 10 ms instead of the machine's, which ask less often: 9 % less at 64
HOPPER_FORWARD_DROPPED = {96: ((128, 1, 1, 2, 2, 5),) * 4}  # and with this, dropout
HOPPER_FORWARD_ALL = {128: ((96, 1, 1, 2, 4, 5),) * 4}  # and with these, softcap, ALiBi and dropout together
# The same for a bias: the first tiling of a row that leaves room for a tile of it for each warpgroup, or for two. By
# count, at 128: the products of 128 queries and 128 keys take 2048 cycles at best. In that time
#   a 16-bit bias of every head and batch       32 KB, 16 bytes a cycle, where memory gives a multiprocessor 17; what
#                                               heads share comes from L2, and one row for all is 256 bytes
#   wavefronts of shared memory                 256 to bring it, 256 to read it (ldmatrix)
#   instructions a score                        2.2, unpack and add, to about 6 of the softmax
# Of the speed without (H200, bfloat16, 8192): 128: bias 0.76, shared by heads 0.72, one row for all 0.78; 64, which
# loses its third group: 0.50, 0.54, 0.57. One item a row, which is portable: 0.22.
# A mask comes as words, a bit for each score, from memory to registers: 1.4 instructions a score, no shared memory, the
# tilings of kernels without one; and before, each time, in bytes to what makes the words: 2.2 TB/s. In tiles of bytes
# it took 3 instructions. 8192, of the speed without, as words and, in the same call, as bytes: 128: 0.78 and 0.77, 64:
# 0.78 and 0.57; a mask of its own for every head and batch, 128: 0.53 and 0.75.
# Tried: three warpgroups at 64 and 96 spill with packed or narrow rows and with a changed score.
HOPPER_FORWARD_LOGITS = {
    64: ((128, 1, 1, 2, 4, 6),),
    96: ((96, 1, 1, 2, 4, 4),),
    128: ((128, 1, 1, 2, 2, 4), (64, 1, 1, 2, 2, 4)),
    192: ((64, 1, 1, 2, 2, 5),),
    256: ((64, 1, 1, 2, 2, 4), (64, 1, 1, 2, 2, 3)),
}
# And those whose tiles divide those of a block mask.
HOPPER_FORWARD_BLOCKS = {
    64: (128, 1, 1, 2, 4, 6),
    128: (128, 1, 1, 2, 4, 4),
    192: (64, 1, 1, 2, 4, 5),
    256: (64, 1, 1, 2, 3, 4),
}
# The same for functions of the user that read an array for every score: all reads of a tile are under way together.
# Beside a block mask, for those that spill with the rows above.
HOPPER_FORWARD_READS = {
    64: (64, 1, 1, 2, 4, 8),
    96: (64, 1, 1, 2, 4, 6),
    128: (64, 1, 1, 2, 4, 8),
}
SHORT = 1024
# A row's maximum is looked for up to the first tile of keys that the group's rows see in full. From
# then on it moves where the sums, which are needed anyway, pass 2^12 (core/softmax.cuh): nothing is lost unless a score
# is 2^127 above it at once. A flag then has the kernel of the rows above, launched behind, compute everything. It costs
# the launch and the flag's zero, by estimate 4 us. By count, at 64, a warp's instructions for a tile of 128 keys were
# 317 instead of 404 before the sums were watched: without 62 maxima, two votes and what they decide. In one loop with
# the other way the exponentials all came before the wait for P V; see above. Speed beside the maximum in the same run
# (H200, bfloat16, samples of 30 ms), lengths 1024 / 4096 / 16384, full then causal; float16 is within 0.02 of it:
#    64: 1.02 1.06 1.10, 1.01 1.03 1.06   128: 1.00 1.11 1.14, 0.96 1.07 1.12   256: 0.96 0.97 0.99, 0.92 0.97 0.99
# The sums watched before the wait for P V, so that all exponentials were, too, on another GPU:
#    64: 1.02 1.05 1.05, 1.01 1.03 1.04   128: 1.01 1.09 1.11, 0.95 1.05 1.10   256: 0.95 0.99 1.00, 0.95 0.97 0.99
# Of changed scores the first ones may be far below those that follow, as those of ALiBi are: there the maximum begins
# at 2^-16, and a flag tells of rows whose sum that leaves too small. 128, 8192, of the speed of a plain call that
# follows sums, before and with sums, not in one run: ALiBi 0.78 and 0.91, as a ScoreMod 0.73 and 0.81.
# Not timed beside the maximum: block masks, packed sequences, softcap without bounds.
STEADY = 128  # head_dim up to which it is used,
STEADY_KEYS = 2048  # keys that a row may see from which on,
STEADY_SCORES = 1 << 28  # and scores of the whole call,
LEAST_SCALE = 1e-30  # and scale: a logarithm divided by it is a finite score
HOPPER_DIMS_V = (64, 96, 128, 192, 256)  # widths of the accumulators of out and dv

# head_dim up to:
# (block_q, block_k, warps, score_warps_k, grad_warps_k, dq_warps_q, stages, blocks_per_sm), ...
BACKWARD = {
    64: ((64, 64, 4, 4, 4, 2, 2, 2), (32, 64, 4, 4, 4, 2, 2, 2), (32, 64, 4, 4, 4, 2, 2, 1)),
    96: ((64, 128, 8, 8, 8, 4, 2, 1), (32, 64, 4, 4, 4, 2, 1, 2), (32, 64, 4, 4, 4, 2, 1, 1)),
    128: ((64, 128, 8, 4, 4, 2, 2, 1), (64, 64, 8, 4, 2, 2, 1, 1), (32, 64, 4, 4, 4, 2, 1, 1)),
    192: ((64, 64, 8, 4, 2, 4, 2, 1), (32, 32, 4, 2, 2, 2, 2, 1), (32, 32, 4, 2, 2, 2, 1, 1)),
    256: ((64, 64, 8, 4, 2, 4, 2, 1), (32, 64, 8, 4, 2, 2, 2, 1), (32, 32, 4, 2, 2, 2, 1, 1)),
}
BACKWARD_PLAIN = {64: ((32, 128, 4, 4, 4, 2, 2, 2),)}
# The same, first choice for what spills with the rows above: dropout, and a changed score with narrow rows.
BACKWARD_SPARE = {
    96: ((32, 64, 4, 4, 4, 2, 2, 2),),
    128: ((64, 64, 8, 4, 2, 2, 1, 1),),
    256: ((32, 64, 8, 4, 2, 2, 2, 1),),
}
# And dropout, whose row of all options spills, or functions of the user that read an array for every score, where
# shared memory has no room for these (64 KiB).
BACKWARD_SMALL = {128: (*BACKWARD_SPARE[128], (32, 32, 4, 2, 2, 2, 1, 1))}
# And what spills with these: a bias and a mask.
BACKWARD_LOGITS = {
    64: ((32, 64, 4, 4, 4, 2, 2, 2),),
    96: ((64, 64, 8, 4, 2, 2, 1, 1),),
    192: ((32, 64, 8, 4, 2, 2, 2, 1),),
}
# And packed sequences: of wide heads and on Turing always, else with a changed score and dropout.
BACKWARD_PACKED = BACKWARD_SPARE | {
    64: ((32, 64, 4, 4, 4, 2, 2, 2),),
    96: (*BACKWARD_SPARE[96], (32, 32, 4, 2, 2, 2, 1, 1)),
    128: (*BACKWARD_SPARE[128], (32, 32, 4, 2, 2, 2, 1, 1)),
    192: ((32, 64, 8, 4, 2, 2, 2, 1),),
    256: ((32, 64, 8, 4, 2, 2, 1, 1), (32, 32, 4, 2, 1, 2, 1, 1)),
}
BACKWARD_BLOCKS = {256: ((32, 64, 8, 4, 2, 2, 1, 1),)}  # and a block mask

# Hopper, head_dim up to: (block_q, groups, stages, key_slots). Relative to cuDNN 9.19, timed in the same way, at the
# same lengths, then deterministic at 4096:
#    64: 1.32 1.32, 1.38 1.41; 1.21, 1.36   128: 1.13 1.17, 1.13 1.22; 1.10, 1.08
# Tried:
#   read lse, delta and what to do next where    5 % less at 128, 3 % less at 64: shared memory answers after all that
#   they are needed, not a tile ahead            is on its way to dq, 100 to 250 cycles
#   dS^T made visible between dv and dq          3 % less at 128, 4 % less at 64: the fence waits while others wait
#   4 tiles of q at 128, 3 at 64                 2 to 5 % less, equal
#   dq added by the copy engine, every warp its  2 to 3 % less at 128
#   own 4 KB
#   causal tiles of all heads by length          64: 25 % less at 1024 and 4096, equal at 16384; 128: 25, 9, -2 %
#   P rounded before the turn, not in it         64: 1 % less, 128: equal, in samples of 30 ms
#   dq by clusters of two blocks, over the keys  128: 2 % less full, 3 to 7 % less causal, though half as much is added:
#   of both; each makes that of every other      the blocks wait for each other's dS. Without adding dq at all 10 % more
#   tile, and sends the other its dS             at 128, 8 % at 64; half of it 6 %; stored, not added, 2 and 3 %
#   not split at 512                             128: equal full, 10 % less causal
#   deterministic: every warp waits for its turn costs 25 % at 64, 31 % at 128, where a thread of its own costs what
#   and tells by itself, behind a fence          stands above; split, 26 %
# Tried before that, in TFLOP/s at lengths 512 / 4096 / 16384, full mask, where cuDNN had 246 / 379 / 440 at 64 and
# 308 / 492 / 515 at 128; figures of another run are marked by what the two that own the keys, without turns, had there:
#   the first S of the next keys issued late     64: 312 / 479 / 514 instead of 348 / 510 / 510; 128: 334 / 542 / 611,
#   (key_slots 1)                                where it is better: with two, 342 / 536 / 569
#   no turns at the tensor cores                 64: 355 / 503 / 509, 128: 338 / 498 / 529
#   3 stages                                     64: 298 / 464 / 481, 128: 331 / 534 / 558
#   dq in a third warpgroup                      64: 260 / 403 / 419, where others had 244 / 448 / 494
#   a small dq sum that idle warps convert       64: 174 / 486 / 540, 128: 175 / 469 / 555, where others had 319 / 528 /
#   while others add to it                       595: at short lengths the blocks wait for places in it
#   dq added by the copy engine                  64: 173 / 353 / 391
#   full masks, every tile of keys begins with   7 % less at 64, 10 % less at 128, from 8192 on: all add to one place
#   the first queries
#   split                                        128: 349 / 455 / 489
# With dropout, 128 and 64 at 8192: 0.60 and 0.40 of the speed without it while two warps decided, in 205 instructions a
# word: of the four schedulers, theirs lacked the issue slots. 0.71 and 0.55 with three, which find the keys of Philox's
# rounds in the constants of the call: 166 instructions by today's count. 138 since calls share rounds and a bit takes
# one instruction to compare: 0.72, causal 0.74 instead of 0.69, at 128. So the deciding warps bind no longer.
# With a bias. By count, at 128: the products of 64 queries and 128 keys take 2560 cycles at best.
# In that time a 16-bit bias brings 16 KB, 6.4 bytes a cycle, takes 128 wavefronts of shared memory to bring and 128 to
# read it transposed (ldmatrix.trans), and adds 2.2 instructions a score. Expected: 0.85 of the speed without it; 0.65
# where a bias up to 64 columns, or beside a mask, splits the backward, which then reads it twice. With a
# bias its gradient was timed, too: see the table in the README.
# A mask comes as words beside lse and delta, a bit for each score: 1.3 instructions a score. 8192, of the speed
# without, and in tiles of bytes, which split the backward: 128: 0.97 and 0.49, 64: 0.94 and 0.36; a mask of its own for
# every head and batch, 128: 0.79 and 0.49.
# Tried: 64, with one slot of keys: spills 16 bytes for a bias; tiles of a mask: 56, and at 128 up to 20 with ALiBi
HOPPER_BACKWARD = {64: (128, 2, 2, 2), 128: (64, 2, 2, 1)}
SPLIT = 512  # keys up to which two kernels are faster at 128

# Hopper, where the backward is split, head_dim up to: (kept, slots, slots_dout) of the kernel of dk and dv, (slots,
# slots_v) of that of dq. Relative to cuDNN 9.19, timed in the same way, at the same lengths:
#   192: 1.71 1.83 1.58 1.83, 1.77 1.75 1.76 1.75   256: 1.57 1.57 1.49 1.62, 1.58 1.58 1.54 1.49
# Tried at both:
#   the sum issued before the next scores            0.96 at 512, 0.85 from 4096 on (dk and dv)
#   all of k and v in shared memory, 2 tiles of q    0.93 to 1.01 (dk and dv)
#   tiles of q and dout for two blocks of a cluster  0.55 to 0.72 (dk and dv)
#   one block a tile                                 full 0.86 to 1.00; causal, where nothing was in pairs, 0.83 at 512
#                                                    and 1.05 to 1.30 from 4096 on (dk and dv), 0.99 to 1.70 (dq)
HOPPER_KEYS = {128: (2, 4, 4), 192: (3, 3, 3), 256: (2, 3, 2)}
HOPPER_KEYS_LOGITS = {192: (2, 3, 3)}  # the same for a bias and a mask
HOPPER_KEYS_READS = {128: (1, 4, 4)}  # and for functions of the user that read an array for every score
HOPPER_QUERIES = {128: (3, 3), 192: (2, 2), 256: (2, 1)}
HOPPER_STATIC = 1024  # bytes that are left for barriers where the tiles of bias and mask are counted
BOUND = 31.0  # softcap up to which the weights of Hopper's forward need no maximum
HOPPER_DROPPED = 192  # head_dim up to which their registers suffice for dropout or functions of the user
HOPPER_READ = 192  # and up to which their shared memory suffices for tiles of bias and mask; 128 for float32 and a mask

# The gradient of a bias, head_dim up to: (block_q, block_k, warps, warps_q, blocks_per_sm), ... At 8192
# queries and keys, 32 heads of 128, a bias in bfloat16 for every logit, two products are 1.1 TFLOP: 2.9 ms at the 380
# TFLOP/s that mma.sync does here, and its bytes, read and written, 8.6 GB: 2.1 ms at 4.1 TB/s. Predicted:
# 3.5 to 4.5 ms, for exponentials and the tiles of K and V, 10 GB from L2, overlap with the products of another block.
# Found (H200, both at once): the backward takes 4.7 ms without a bias, 17.7 with one that batches share, 14.9 with one
# that heads share, too, 12.7 with one row: two to three times as much as predicted. By count it waits for L2: 26 GB.
BIAS_GRADIENT = {
    64: ((128, 64, 4, 2, 2), (64, 64, 4, 2, 2), (64, 64, 4, 2, 1)),
    96: ((128, 64, 4, 2, 2), (64, 64, 4, 2, 2), (64, 64, 4, 2, 1)),
    128: ((128, 64, 4, 2, 2), (64, 64, 4, 2, 2), (64, 64, 4, 2, 1), (64, 32, 4, 2, 1)),
    192: ((64, 64, 4, 2, 2), (128, 64, 8, 4, 1), (64, 64, 4, 2, 1), (32, 32, 4, 2, 1)),
    256: ((128, 64, 8, 4, 1), (64, 64, 8, 4, 1), (64, 32, 4, 2, 1), (32, 32, 4, 2, 1)),
}
# The same for what spills with the rows above: block masks, functions of the user, dropout.
BIAS_GRADIENT_SPARE = {
    **dict.fromkeys((64, 96, 128), ((64, 64, 4, 2, 2),)),
    256: ((64, 64, 8, 4, 1),),
}

# Of the kernel of dscore_mod, head_dim up to: (block_k, warps), ...: not timed.
MOD_GRADIENT = {128: ((32, 4), (32, 2)), 256: ((32, 4), (16, 2))}

# The same on Hopper, where q, k, v and dout have maps, head_dim up to: (cluster_q, cluster_k, slots), ...
# With the kernel above, at 8192, 2 batches and 16 heads of 128, a backward took 17.7 ms for a bias of the heads, 14.9
# for one of all, 12.7 for one of keys, and 4.7 without. By count, at 128: the products of 128 queries and 128 keys take
# 2048 cycles at best, 1.2 ms of that case at 1.7 GHz. In that time
#   q, k, dout and v of a block                  128 KB, 64 bytes a cycle, where L2 gives a multiprocessor about 25;
#                                                48 in pairs of blocks that share, 32 in clusters of two by two
#   a 16-bit bias of the heads and its gradient  64 KB in two tiles, 16 bytes a cycle, where memory gives 17
#   exponentials                                 1024 cycles: at 64 as many as the products
#   instructions                                 650 of each of 8 warps: 1300 cycles
# Predicted for that case: 1.8 to 2.6 ms, 2.4 to 3.0 in pairs, 3.2 to 4 alone. In the same units the portable kernel
# needs 192 KB, and 4600 cycles of shared memory (ldmatrix).
# Of a bias that has an element for each score, where the backward is split, the kernel of dq writes dbias: 4.3 GB in
# that case, 1 ms, beside products of 3 ms. Predicted: 0 to 10 % of the backward.
# Found, with the kernel of dq beside it (H200): the backward takes 8.7, 8.5 and 8.5 ms, of 4.3 without, as with a mask,
# whose two kernels alone take 8.4.
HOPPER_BIAS_GRADIENT = {64: ((2, 2, 4), (2, 2, 3)), 128: ((2, 2, 3), (2, 2, 2))}

# Shared memory of one block by compute capability, for compiling without a GPU.
SHARED_LIMIT = {
    75: 65536,
    80: 166912,
    86: 101376,
    87: 166912,
    89: 101376,
    90: 232448,
    100: 232448,
    103: 232448,
    120: 101376,
}


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def paths(capability: int, nvrtc: tuple[int, int]) -> tuple[str, ...]:
    """Return the kernel paths that a device can take, the fastest one last."""
    return PATHS if capability == 90 and nvrtc >= (12, 9) else PATHS[:1]


def path(capability: int, nvrtc: tuple[int, int]) -> str:
    """Return the kernel path for a device: its fastest one, or what the environment variable CUPYFLASH_PATH names."""
    able = paths(capability, nvrtc)
    name = os.environ.get("CUPYFLASH_PATH", able[-1])
    if name not in PATHS:
        raise ValueError(f"CUPYFLASH_PATH={name!r} names no kernel path; there are {', '.join(PATHS)}")
    if name not in able:
        version = ".".join(map(str, nvrtc))
        raise ValueError(
            f"CUPYFLASH_PATH={name} needs a GPU of compute capability 9.0 and NVRTC 12.9 or later; here are "
            f"{capability / 10} and {version}"
        )
    return name


def divides_mask_tile(*sizes: int) -> bool:
    """Whether a tile of so many queries and keys lies within one of those that a block mask has bits for."""
    return not any(MASK_TILE % size for size in sizes)


def fitting(table: dict, first: dict, make, head_dim: int, shared_limit: int, blocks: bool = False):
    """Return the first spec that fits, of the rows of `first` and `table` for `head_dim`."""
    key = min(limit for limit in table if limit >= head_dim)
    specs = [make(tiling) for tiling in first.get(key, ()) + table[key] if not blocks or divides_mask_tile(*tiling[:2])]
    for spec in specs:
        if spec.shared_bytes * spec.blocks_per_sm <= shared_limit:
            return spec
    least = min(spec.shared_bytes for spec in specs)
    raise NotImplementedError(
        f"head_dim {head_dim} needs {least} bytes of shared memory in a block, and this GPU has {shared_limit}; "
        "NumPy arrays take every head_dim"
    )


def _change(problem: Problem) -> tuple[bool, bool, bool]:
    return problem.softcap is not None, problem.alibi, problem.dropout > 0


def _bounded(problem: Problem) -> bool:
    """Whether softcap keeps exponents so near to each other that the weights need no maximum.

    They are relative to half the cap, so that a weight is between 2**-68 and 2**23: bfloat16 has as many exponents as
    float32, and neither sums nor values below 1e19 overflow, however long the row. A mask may leave a row with one key,
    whose weight should be 1, and nobody knows.
    """
    if problem.dtype != "bfloat16" or problem.softcap is None or problem.softcap > BOUND:
        return False
    return not (problem.alibi or reads(problem) or problem.blocks or problem.mods)


def _logits(problem: Problem) -> tuple[int, bool]:
    return BIAS_TYPES.index(problem.bias), problem.mask


def reads(problem: Problem) -> bool:
    """Whether there is an array with something for each pair of a query and a key."""
    return problem.bias is not None or problem.mask


@functools.lru_cache(maxsize=1024)
def forward(problem: Problem, access: int, float32_out: bool, shared_limit: int, capability: int = 90) -> Variant:
    """Return the forward kernel for `problem` on a device with `shared_limit` bytes of shared memory in a block."""
    d, dv = round_up(problem.head_dim, 16), round_up(problem.head_dim_v, 16)

    def make(tiling):
        _, _, warps, out_warps_q, *_ = tiling
        columns = 16 * (warps // out_warps_q)  # every warp gets a whole number of mma columns
        more = *_change(problem), *_logits(problem), problem.blocks, bool(problem.varlen)
        return ForwardSpec(d, round_up(dv, columns), *tiling, float32_out, access, *more)

    if reads(problem):
        first = FORWARD_LOGITS | FORWARD_MIXED if problem.mods else FORWARD_LOGITS
    elif problem.mods or problem.varlen or any(_change(problem)):
        first = FORWARD_ALIBI if problem.alibi else FORWARD_CHANGED
        if problem.dropout or problem.mods or problem.varlen and access < 16:
            packed = FORWARD_PACKED if problem.varlen else FORWARD_DROPPED
            first = FORWARD_DROPPED_BLOCKS if problem.blocks else packed
    else:
        first = {} if float32_out or access < 16 or capability >= 100 or problem.blocks else FORWARD_PLAIN
    table = FORWARD_WITH_BITS if problem.dropout else FORWARD
    spec = fitting(table, first, make, max(d, dv), shared_limit, problem.blocks)
    return Variant("sm80/forward.cuh", "forward", problem.dtype, spec, problem.mods)


@functools.lru_cache(maxsize=1024)
def hopper_forward(problem: Problem, access: int, float32_out: bool) -> Variant:
    """Return the forward kernel for `problem` on Hopper, for arrays that its copy engine can read.

    `access` is that of out alone, which is written in 16, 4 or 2 bytes at once.
    """
    access = 4 if float32_out else 16 if access == 16 else min(access, 4)  # float32 goes out element by element
    d = round_up(problem.head_dim, 16)
    dv = min(n for n in HOPPER_DIMS_V if n >= problem.head_dim_v)

    def row(table):
        return table[min(limit for limit in table if limit >= max(d, dv))]

    def make(tiling, logit_slots=0):
        # NVRTC 13.5 has no registers for the widest heads, rows of several of them, and all that changes a score.
        many = problem.bias and problem.mask and any(_change(problem)) and d > 192
        able = access == 16 and not problem.dropout and not problem.blocks and not problem.varlen and not many
        packed = able and _packing_pays(problem, tiling[1] * tiling[3])
        more = (
            *_change(problem),
            *_logits(problem),
            logit_slots,
            problem.blocks,
            _bounded(problem),
            bool(problem.varlen),
        )
        return HopperForwardSpec(d, dv, *tiling, packed, float32_out, access, *more)

    changed = problem.mods is not None or any(_change(problem))
    if problem.bias:
        table = HOPPER_FORWARD_LOGITS
        few = (problem.dropout or problem.mask) and sum(_change(problem)) > 1  # registers
        spec = _with_logits(make, row(table)[-1 if few else 0 :], problem.dropout > 0)  # which spills with one at 128
    elif problem.blocks:
        spec = make(row(HOPPER_FORWARD_BLOCKS | (HOPPER_FORWARD_READS if _crowded(problem.mods) else {})))
    elif problem.mods and problem.mods.reads:
        spec = make(row(HOPPER_FORWARD_READS))
    else:
        at = 2 * problem.banded + bool(problem.varlen or problem.seqlen_k > SHORT)
        tilings = HOPPER_FORWARD
        if problem.softcap is not None:
            tilings = tilings | (HOPPER_FORWARD_SOFTCAP if _bounded(problem) else HOPPER_FORWARD_TIGHT)
        spec = make(row(tilings)[at])
        both = problem.mods is not None and any(_change(problem))
        spare = problem.dropout or both or changed and (spec.packed or access < 16 or problem.varlen or problem.mask)
        if spare or problem.varlen and 64 < max(d, dv) <= 96:
            tilings = tilings | HOPPER_FORWARD_SPARE | (HOPPER_FORWARD_DROPPED if problem.dropout else {})
            tilings |= HOPPER_FORWARD_ALL if all(_change(problem)) else {}
            spec = make(row(tilings)[at])
    return Variant("sm90/forward.cuh", "hopper_forward", problem.dtype, spec, problem.mods)


def steady(problem: Problem) -> bool:
    """Whether Hopper's forward follows sums in place of maxima, see `STEADY`."""
    changed = problem.softcap is not None or problem.alibi or problem.mods is not None
    # Without blocks, no tile of a mask is known to be seen in full, and none of a function's.
    if problem.bias or _bounded(problem) or (problem.mods and problem.mods.mask):
        return False
    if (changed or problem.dropout) if problem.blocks else problem.mask:
        return False
    if changed and problem.dtype == "float16":  # weights of many keys far below where the maximum begins lose digits
        return False
    if problem.softcap is not None and max(problem.head_dim, problem.head_dim_v) <= 64:  # registers
        return False
    if max(problem.head_dim, problem.head_dim_v) > STEADY or problem.scale < LEAST_SCALE:
        return False
    sides = problem.left, problem.right
    if problem.varlen:  # of sequences as long as their mean; where they differ, most rows are of longer ones
        means = problem.seqlen_q // problem.batch, 2 * problem.seqlen_k // problem.batch
        problem = replace(problem, varlen=None, seqlen_q=means[0], seqlen_k=means[1])
    keys = problem.seqlen_k if None in sides else min(problem.seqlen_k, sum(sides) + 1)
    return keys >= STEADY_KEYS and problem.batch * problem.heads_q * counts.scores(problem) >= STEADY_SCORES


def steadily(main: Variant) -> tuple[Variant, Variant]:
    """Return the kernel that follows sums, and `main` as it runs behind: only if the flag is set."""
    return tuple(replace(main, spec=replace(main.spec, **{name: True})) for name in ("steady", "only_if"))


def _crowded(mods) -> bool:
    """Whether functions of the user beside a block mask spill with 128 keys: a ScoreMod that reads or has a MaskMod."""
    return mods is not None and mods.score is not None and (mods.reads or mods.mask is not None)


def _with_logits(make, tilings: tuple, prefers_two: bool = False):
    """Return the spec of the first tiling that leaves room for two tiles of bias and mask, or one."""
    specs = [make(tiling, slots) for tiling in tilings for slots in (2, 1)]
    if prefers_two:
        specs.sort(key=lambda spec: -spec.logit_slots)
    return next(spec for spec in specs if spec.shared_bytes + HOPPER_STATIC <= SHARED_LIMIT[90])


def _packing_pays(problem: Problem, groups: int) -> bool:
    """Whether tiles that hold all heads of a group are clearly fewer than tiles of one head."""
    if not 1 < problem.group <= 64:
        return False
    packed, single = (-(-problem.seqlen_q // n) for n in (groups * (64 // problem.group), groups * 64))
    return 1.1 * packed < single * problem.group


@functools.lru_cache(maxsize=1024)
def backward(problem: Problem, access: int, deterministic: bool, shared_limit: int, capability: int = 90) -> Variant:
    """Return the main backward kernel for `problem`."""
    d, dv = round_up(problem.head_dim, 32), round_up(problem.head_dim_v, 32)

    def make(tiling):
        _, _, warps, _, grad_warps_k, dq_warps_q, *_ = tiling
        columns = 16 * max(warps // grad_warps_k, warps // dq_warps_q)  # every warp gets a whole number of mma columns
        more = *_change(problem), *_logits(problem), problem.blocks, bool(problem.varlen)
        return BackwardSpec(round_up(d, columns), round_up(dv, columns), *tiling, deterministic, access, *more)

    changed = problem.mods is not None or any(_change(problem))
    with_options = changed or reads(problem) or problem.blocks
    plain = not (deterministic or access < 16 or capability >= 100 or with_options)
    spare = problem.dropout or problem.mods or access < 16 and changed
    first = BACKWARD_SPARE if spare else BACKWARD_PLAIN if plain else {}
    if problem.varlen and (changed or max(d, dv) > 192 or capability < 80):
        first = BACKWARD_PACKED
    if problem.blocks:
        first = BACKWARD_SPARE | BACKWARD_BLOCKS
    if problem.dropout or problem.mods and problem.mods.reads:
        first = first | BACKWARD_SMALL
    if reads(problem) or problem.blocks and problem.mods:
        first = BACKWARD_SPARE | BACKWARD_BLOCKS | BACKWARD_LOGITS if problem.mods else BACKWARD_SPARE | BACKWARD_LOGITS
    spec = fitting(BACKWARD, first, make, max(d, dv), shared_limit, problem.blocks)
    return Variant("sm80/backward.cuh", "backward", problem.dtype, spec, problem.mods)


def split(problem: Problem, deterministic: bool = False) -> bool:
    """Whether Hopper computes dq in a kernel of its own: two more products, which cost less than a sum in memory.

    The one kernel has no registers left for a mask beside a bias, for a bias or functions of the user up to 64, for
    functions that read or follow a softcap, nor for a block mask where the order is fixed, the score changed or weights
    dropped.
    Few keys do not split dropout, which costs the one kernel less: idle warps decide it.
    """
    width = max(problem.head_dim, problem.head_dim_v)
    if width > 128 or problem.mask and problem.bias:
        return True
    if problem.mods and (problem.mods.reads or problem.softcap is not None):
        return True
    if problem.blocks and (deterministic or any(_change(problem))):
        return True
    if width <= 64:
        return bool(problem.bias or problem.mods)
    seqlen_k = problem.seqlen_k // problem.batch if problem.varlen else problem.seqlen_k  # of packed sequences the mean
    return seqlen_k <= SPLIT and not problem.dropout


def split_packed(problem: Problem, access: int, deterministic: bool) -> bool:
    """The same of packed sequences, for which the one kernel has fewer registers; `access` is that of the gradients."""
    in_order = deterministic and max(problem.head_dim, problem.head_dim_v) > 64
    return split(problem, deterministic) or access < 16 or any(_change(problem)) or in_order


def _mixes(problem: Problem) -> bool:
    """Whether it has options that only the portable kernels combine. Hopper's bring tiles of a bias for every tile of
    keys, also for those that a block mask hides, and have no registers for functions of the user beside either.
    """
    if problem.mods:
        return reads(problem)
    return problem.bias is not None and problem.blocks


def forward_elsewhere(problem: Problem) -> bool:
    """Whether the forward must take the portable kernel: also for wide heads and functions that read, or dropout beside
    a mask and a float32 bias, for which no registers are left.
    """
    width = max(problem.head_dim, problem.head_dim_v)
    if problem.dropout and problem.bias == "float32" and problem.mask and width > HOPPER_READ:
        return True
    return _mixes(problem) or bool(problem.mods) and problem.mods.reads and width > max(HOPPER_FORWARD_READS)


def backward_elsewhere(problem: Problem) -> bool:
    """Whether the backward must take the portable kernel: also where Hopper's have no registers left for its options,
    or no shared memory for its bias and mask. Beside those and functions of the user, dropout has neither the registers
    to decide nor, in the one kernel, the warps: one copies the bias. Packed sequences take registers themselves.
    """
    width = max(problem.head_dim, problem.head_dim_v)
    if problem.mods:
        widest = 128 if problem.mods.reads else HOPPER_DROPPED
    elif reads(problem):
        widest = 128 if problem.bias == "float32" and problem.mask else HOPPER_READ
    else:
        changed = problem.softcap is not None or problem.alibi
        wide = width > (128 if problem.varlen else HOPPER_DROPPED)
        if problem.varlen and wide and changed:
            return True
        return _mixes(problem) or problem.dropout > 0 and (wide or bool(problem.varlen) and changed)
    return _mixes(problem) or problem.dropout > 0 or width > widest


@functools.lru_cache(maxsize=1024)
def hopper_backward(problem: Problem, access: int, deterministic: bool) -> Variant:
    """Return Hopper's main backward kernel of heads up to 128, for arrays that its copy engine can read.

    `access` is that of the gradients alone, which are written in 16, 4 or 2 bytes at once.
    """
    access = 16 if access == 16 else min(access, 4)
    d = min(n for n in HOPPER_BACKWARD if n >= max(problem.head_dim, problem.head_dim_v))
    dv = min(n for n in HOPPER_DIMS_V if n >= problem.head_dim_v)

    def make(tiling, logit_slots=0):
        more = *_change(problem), BIAS_TYPES.index(problem.bias), logit_slots, problem.mask, problem.blocks
        return HopperBackwardSpec(d, dv, *tiling, deterministic, access, *more, varlen=bool(problem.varlen))

    spec = _with_logits(make, (HOPPER_BACKWARD[d],)) if problem.bias else make(HOPPER_BACKWARD[d])
    return Variant("sm90/backward.cuh", "hopper_backward", problem.dtype, spec, problem.mods)


def rotated(problem: Problem, deterministic: bool, tiles: int, places: int) -> bool:
    """Whether the tiles of keys of a head begin with different queries, so that they add to dq at different places.

    With a mask they see different queries anyway. Deterministic, each waits for all others of its head, which must run
    at the same time: rotated only where whole heads fill nearly all `places`.
    """
    hides = problem.banded or problem.blocks
    return not hides and (not deterministic or tiles <= places and places % tiles <= places // 10)


@functools.lru_cache(maxsize=1024)
def hopper_split_backward(problem: Problem, access: int, dbias: bool = False) -> tuple[Variant, Variant]:
    """Return Hopper's kernels of (dk, dv) and of dq, for arrays that its copy engine can read.

    `access` is that of the gradients alone, which are written in 16, 4 or 2 bytes at once; with `dbias` the latter
    writes dbias too.
    """
    access = 16 if access == 16 else min(access, 4)
    d, dv = round_up(problem.head_dim, 64), round_up(problem.head_dim_v, 64)
    width = min(n for n in HOPPER_KEYS if n >= max(d, dv))

    def make(kind, table):
        def of(tiling, logit_slots=0):
            more = *_change(problem), *_logits(problem), logit_slots, problem.blocks
            return kind(d, dv, *tiling, access, *more, varlen=bool(problem.varlen))

        return _with_logits(of, (table[width],)) if reads(problem) else of(table[width])

    spare = HOPPER_KEYS_LOGITS if reads(problem) else HOPPER_KEYS_READS if problem.mods and problem.mods.reads else {}
    keys = make(HopperKeysSpec, HOPPER_KEYS | spare)
    queries = replace(make(HopperQueriesSpec, HOPPER_QUERIES), dbias=dbias)
    return (
        Variant("sm90/backward_keys.cuh", "hopper_keys", problem.dtype, keys, problem.mods),
        Variant("sm90/backward_queries.cuh", "hopper_queries", problem.dtype, queries, problem.mods),
    )


def stores_dbias(problem: Problem, shape: tuple) -> bool:
    """Whether the kernel of dq of a split backward writes a dbias of `shape`: each of its elements is one of dS.

    With softcap they differ by its derivative; wide heads and a mask leave no registers.
    """
    logits = problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k
    wide = max(problem.head_dim, problem.head_dim_v) > 128
    return shape == logits and problem.softcap is None and not (problem.mask and wide)


def before_backward(main: Variant, float32_out: bool, access: int) -> Variant:
    """Return the kernel before `main`; `access` is that of dout and out."""
    packed = isinstance(main.spec, HopperBackwardSpec)
    spec = PrepareSpec(main.spec.head_dim, main.spec.head_dim_v, packed, float32_out, access, main.spec.varlen)
    return Variant("any/around_backward.cuh", "prepare_backward", main.dtype, spec)


def after_backward(main: Variant) -> Variant:
    """Return the kernel after `main`, where that left a sum of dq."""
    of_main = main.spec
    spec = PrepareSpec(of_main.head_dim, of_main.head_dim_v, False, False, of_main.access, of_main.varlen)
    return Variant("any/around_backward.cuh", "finish_backward", main.dtype, spec)


def sink_gradient(before: Variant) -> Variant:
    """Return the kernel of dsink, of what `before` left."""
    spec = SinkSpec(32, before.spec.packed, before.spec.varlen)
    return Variant("any/sink.cuh", "sink_gradient", before.dtype, spec)


def mask_words(main: Variant, along_rows: bool) -> Variant:
    """Return the kernel before all others where `main` reads words of a mask; neighbours in memory are rows or not."""
    return Variant("any/mask_words.cuh", "make_mask_words", main.dtype, MaskWordsSpec(8, along_rows))


def segments(main: Variant) -> Variant:
    """Return the kernel before all others where sequences are packed."""
    return Variant("any/segments.cuh", "prepare_segments", main.dtype, SegmentsSpec(32))


@functools.lru_cache(maxsize=1024)
def bias_gradient(
    problem: Problem, before: Variant, shape: tuple, access: int, shared_limit: int, mods_at: int = 0
) -> Variant:
    """Return the kernel of a dbias of `shape`, four axes, of what `before` left; `access` is that of the inputs."""
    d, dv = round_up(problem.head_dim, 16), round_up(problem.head_dim_v, 16)
    more = *_change(problem), *_logits(problem), problem.blocks, mods_at if problem.mods else 0

    def make(tiling):
        return BiasGradientSpec(d, dv, *tiling, True, before.spec.packed, access, *more)

    spare = problem.blocks or problem.mods or problem.dropout
    spec = fitting(BIAS_GRADIENT, BIAS_GRADIENT_SPARE if spare else {}, make, max(d, dv), shared_limit)
    spec = replace(spec, summed=math.prod(bias_tiles(problem, spec, shape)[0]) > 1)
    return Variant("sm80/bias_gradient.cuh", "bias_gradient", problem.dtype, spec, problem.mods)


@functools.lru_cache(maxsize=1024)
def hopper_bias_gradient(problem: Problem, before: Variant, box_k: int) -> Variant | None:
    """Return Hopper's kernel of dbias, None for wide heads and for options that it does not know.

    `box_k`: rows that the maps of k and v copy at once.
    """
    width = max(problem.head_dim, problem.head_dim_v)
    if width > max(HOPPER_BIAS_GRADIENT) or problem.dropout or _mixes(problem):
        return None
    d, dv = round_up(problem.head_dim, 64), round_up(problem.head_dim_v, 64)
    tiles_q, tiles_k = -(-problem.seqlen_q // 128), -(-problem.seqlen_k // 128)
    more = before.spec.packed, *_change(problem)[:2], *_logits(problem)

    def make(tiling, logit_slots):
        cluster_q, cluster_k, slots = tiling
        cluster = min(cluster_q, tiles_q), min(cluster_k, tiles_k)
        return HopperBiasGradientSpec(d, dv, *cluster, slots, box_k, *more, logit_slots)

    spec = _with_logits(make, HOPPER_BIAS_GRADIENT[min(n for n in HOPPER_BIAS_GRADIENT if n >= width)])
    return Variant("sm90/bias_gradient.cuh", "hopper_bias_gradient", problem.dtype, spec)


def bias_tiles(problem: Problem, spec: BiasGradientSpec | HopperBiasGradientSpec, shape: tuple) -> tuple[list, list]:
    """Return the tiles of scores along the axes that are summed, of one tile of dbias, and along the others."""
    counts = problem.batch, problem.heads_q, -(-problem.seqlen_q // spec.block_q), -(-problem.seqlen_k // spec.block_k)
    summed = [count for count, size in zip(counts, shape) if size == 1]
    return summed, [count for count, size in zip(counts, shape) if size > 1]


def bias_sum(main: Variant) -> Variant:
    """Return the kernel that adds the parts of dbias."""
    return Variant("sm80/bias_gradient.cuh", "add_bias_gradients", main.dtype, BiasSumSpec(8, main.spec.bias))


@functools.lru_cache(maxsize=1024)
def mod_gradient(problem: Problem, before: Variant, access: int, mods_at: int, shared_limit: int) -> Variant:
    """Return the kernel of dscore_mod, of what `before` left; `access` is that of the inputs."""
    d, dv = round_up(problem.head_dim, 16), round_up(problem.head_dim_v, 16)
    more = *_change(problem), *_logits(problem), problem.blocks

    def make(tiling):
        return ModGradientSpec(d, dv, *tiling, access, mods_at, before.spec.packed, *more)

    spec = fitting(MOD_GRADIENT, {}, make, max(d, dv), shared_limit)
    return Variant("sm80/mod_gradient.cuh", "mod_gradient", problem.dtype, spec, problem.mods)


def variants(capability: int) -> tuple[Variant, ...]:
    """Return the kernels that devices of `capability` (80, 90, ...) choose without softcap, ALiBi and dropout."""
    from . import precise  # which chooses by the functions here

    return tuple(dict.fromkeys((*_variants(capability), *precise.variants(capability))))


def _variants(capability: int) -> Iterator[Variant]:
    limit = SHARED_LIMIT.get(capability, min(SHARED_LIMIT.values()))
    for dtype in ("float16",) if capability < 80 else ("float16", "bfloat16"):
        for head_dim in FORWARD:
            problem = Problem(dtype, 1, 1, 1, 1, 1, head_dim, head_dim, 1.0)
            aligned = ((16, False), (2, False)) if head_dim == 128 else ((16, False),)
            for access, float32_out in (*aligned, (16, True)):
                yield forward(problem, access, float32_out, limit, capability)
            if capability == 90:
                masks = [(right, n) for right in (None, 0) for n in (1, SHORT + 1)]
                masked = [replace(problem, seqlen_k=n, right=right) for right, n in masks]
                yield from dict.fromkeys(hopper_forward(one, 16, False) for one in masked)
                yield hopper_forward(problem, 16, True)
                yield hopper_forward(problem, 2, False)
                yield hopper_forward(replace(problem, heads_q=3), 16, False)  # packed
                if head_dim <= STEADY:
                    yield from (one for plain in masked for one in steadily(hopper_forward(plain, 16, False)))
                long = replace(problem, seqlen_k=SPLIT + 1)
                if not split(long):
                    yield hopper_backward(long, 16, True)
                for access in (16, 2):
                    mains = ()
                    if split(problem):
                        mains += hopper_split_backward(problem, access)
                    if not split(long):
                        mains += (hopper_backward(long, access, False),)
                        yield after_backward(mains[-1])
                    yield from mains
                    befores = dict.fromkeys(before_backward(main, False, access) for main in mains[::2])
                    yield from befores
                    yield from map(sink_gradient, befores)
            for access, deterministic in (*aligned, (16, True)):
                try:
                    main = backward(problem, access, deterministic, limit, capability)
                except NotImplementedError:
                    continue
                yield main
                if not deterministic:
                    yield (before := before_backward(main, False, access))
                    yield sink_gradient(before)
                    yield after_backward(main)
